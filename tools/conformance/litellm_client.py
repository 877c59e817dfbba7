"""litellm: the server through its OpenAI, Anthropic and Ollama routes."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from tools.conformance.client_checks import (
    CITY_SCHEMA,
    MESSAGES,
    ClientChecks,
    assert_equal,
    catch_error,
)
from tools.conformance.suite import SuiteResult

TITLE = "litellm: OpenAI's, Anthropic's and Ollama's routes; streaming, tools, formats, errors"
PACKAGE = "litellm"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather", "parameters": CITY_SCHEMA},
}
ROUTES = {"openai": "/v1", "anthropic": "", "ollama_chat": ""}
"""Prefix of a model's name → what follows the server's address."""
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are otherwise fetched
    import litellm

    litellm.telemetry = False
    return CHECKS.run((litellm, base_url.removesuffix("/v1")), model)


def options(client: Any, model: str, route: str = "openai", **more: Any) -> dict[str, Any]:
    """Arguments of a greedy answer of few tokens."""
    common = {"model": f"{route}/{model}", "api_base": client[1] + ROUTES[route], "api_key": "none"}
    limits = {"temperature": 0, "max_tokens": 12, "timeout": 300, "num_retries": 0}
    return {**common, **limits, "messages": MESSAGES, **more}


def complete(client: Any, model: str, route: str = "openai", **more: Any) -> Any:
    """A greedy answer of few tokens."""
    return client[0].completion(**options(client, model, route, **more))


def text_of(answer: Any) -> str:
    """The content of an answer."""
    return str(answer.choices[0].message.content)


@CHECKS.add("chat: the same text through every route")
def _routes(client: Any, model: str) -> None:
    answers = {route: complete(client, model, route) for route in ROUTES}
    texts = {route: text_of(answer) for route, answer in answers.items()}
    assert_equal(len({text.strip() for text in texts.values()}), 1, f"texts {texts}")
    for route, answer in answers.items():
        assert_equal(answer.usage.completion_tokens, 12, f"{route}: tokens")
        assert_equal(answer.choices[0].finish_reason, "length", f"{route}: reason")


@CHECKS.add("chat: streamed through every route, the same text")
def _streams(client: Any, model: str) -> None:
    for route in ROUTES:
        chunks = list(complete(client, model, route, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert_equal(text.strip(), text_of(complete(client, model, route)).strip(), route)


@CHECKS.add("chat: async")
def _async(client: Any, model: str) -> None:
    answer = asyncio.run(client[0].acompletion(**options(client, model)))
    assert_equal(text_of(answer), text_of(complete(client, model)), "text")


@CHECKS.add("tools: a forced call through OpenAI's and Anthropic's routes, and its result")
def _tools(client: Any, model: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for route in ("openai", "anthropic"):
        answer = complete(client, model, route, tools=[TOOL], tool_choice=choice, max_tokens=64)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert_equal(call.function.name, "weather", f"{route}: name")
        assert_equal(set(json.loads(call.function.arguments)), {"city"}, f"{route}: arguments")
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sun"}
        history = [*MESSAGES, message.model_dump(), result]
        text = text_of(complete(client, model, route, messages=history, tools=[TOOL]))
        assert_equal(bool(text), True, f"{route}: an answer to the result")


@CHECKS.add("response_format: JSON of a schema through OpenAI's and Ollama's routes")
def _format(client: Any, model: str) -> None:
    schema = {"name": "place", "schema": CITY_SCHEMA, "strict": True}
    for route in ("openai", "ollama_chat"):
        answer = complete(
            client,
            model,
            route,
            max_tokens=64,
            response_format={"type": "json_schema", "json_schema": schema},
        )
        assert_equal(set(json.loads(text_of(answer))), {"city"}, route)


@CHECKS.add("embeddings: through OpenAI's route")
def _embeddings(client: Any, model: str) -> None:
    answer = client[0].embedding(
        model=f"openai/{model}", input=["one", "two"], api_base=client[1] + "/v1", api_key="none"
    )
    assert_equal([len(each["embedding"]) > 8 for each in answer.data], [True, True], "vectors")


@CHECKS.add("errors: litellm's own classes")
def _errors(client: Any, model: str) -> None:
    litellm = client[0]
    for route in ("openai", "anthropic"):
        catch_error(litellm.BadRequestError, partial(complete, client, model, route, top_p=9))
        catch_error(litellm.NotFoundError, partial(complete, client, "no-such-model", route))
