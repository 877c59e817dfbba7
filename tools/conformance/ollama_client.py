"""Ollama's Python client: chat, generate, streams, tools, formats, embeddings, the model list."""

from __future__ import annotations

import asyncio
import json
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

TITLE = "Ollama's Python client: chat, generate, streaming, formats, embeddings, models, errors"
PACKAGE = "ollama"
OPTIONS = {"temperature": 0, "num_predict": 12, "num_ctx": 2048}
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    from ollama import Client

    return CHECKS.run(Client(host=base_url.removesuffix("/v1"), timeout=300), model)


def chat(client: Any, model: str, **more: Any) -> Any:
    """A greedy answer of few tokens."""
    return client.chat(model=model, **{"messages": MESSAGES, "options": OPTIONS, **more})


@CHECKS.add("models: list, ps, show")
def _models(client: Any, model: str) -> None:
    assert_equal(model in [each.model for each in client.list().models], True, "list")
    assert_equal(model in [each.model for each in client.ps().models], True, "ps")
    shown = client.show(model)
    assert_equal("completion" in shown.capabilities, True, "capabilities")
    architecture = shown.modelinfo["general.architecture"]
    assert_equal(shown.modelinfo[f"{architecture}.context_length"] > 0, True, "context length")


@CHECKS.add("chat: whole, with counts and times")
def _whole(client: Any, model: str) -> None:
    answer = chat(client, model)
    assert_equal((answer.message.role, answer.done, answer.done_reason),
                 ("assistant", True, "length"), "answer")  # fmt: skip
    assert_equal(answer.eval_count, 12, "eval_count")
    parts = answer.prompt_eval_duration + answer.eval_duration
    assert_equal(0 < parts <= answer.total_duration, True, "times")


@CHECKS.add("chat: streamed, the same text; the tag :latest")
def _streamed(client: Any, model: str) -> None:
    parts = list(chat(client, f"{model}:latest", stream=True))
    text = "".join(part.message.content for part in parts)
    assert_equal(text, chat(client, model).message.content, "text")
    assert_equal([part.done for part in parts][-2:], [False, True], "the last part")


@CHECKS.add("chat: async, streamed")
def _async(client: Any, model: str) -> None:
    from ollama import AsyncClient

    async def call() -> str:
        other = AsyncClient(host=str(client._client.base_url))
        stream = await other.chat(model=model, messages=MESSAGES, options=OPTIONS, stream=True)
        return "".join([part.message.content async for part in stream])

    assert_equal(asyncio.run(call()), chat(client, model).message.content, "text")


@CHECKS.add("chat: format json and a schema")
def _format(client: Any, model: str) -> None:
    options = {"temperature": 0, "num_predict": 64}
    answer = chat(client, model, format=CITY_SCHEMA, options=options)
    assert_equal(set(json.loads(answer.message.content)), {"city"}, "keys")
    answer = chat(client, model, format="json", options=options)
    assert_equal(answer.message.content.lstrip()[:1], "{", "an object")


@CHECKS.add("chat: tools, and a conversation with a call and its result")
def _tools(client: Any, model: str) -> None:
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return city

    chat(client, model, tools=[weather])
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "Sun"},
    ]
    answer = chat(client, model, messages=history, tools=[weather])
    assert_equal(answer.eval_count > 0, True, "an answer")


@CHECKS.add("generate: as a chat of one message; streamed, raw, load")
def _generate(client: Any, model: str) -> None:
    ask: Any = {"prompt": MESSAGES[0]["content"], "options": OPTIONS}
    answer = client.generate(model=model, **ask)
    assert_equal(answer.response, chat(client, model).message.content, "text")
    streamed = "".join(part.response for part in client.generate(model=model, stream=True, **ask))
    assert_equal(streamed, answer.response, "streamed")
    raw = client.generate(model=model, prompt="One, two, three,", raw=True, options=OPTIONS)
    assert_equal(raw.eval_count, 12, "raw")
    assert_equal(client.generate(model=model).done_reason, "load", "load")


@CHECKS.add("embed, embeddings")
def _embed(client: Any, model: str) -> None:
    many = client.embed(model=model, input=["a cat", "a dog", "a cat"])
    assert_equal(len(many.embeddings), 3, "count")
    worst = max(abs(a - b) for a, b in zip(many.embeddings[0], many.embeddings[2], strict=True))
    assert_equal(worst < 1e-6, True, "the same text")
    one = client.embeddings(model=model, prompt="a cat").embedding
    assert_equal(max(abs(a - b) for a, b in zip(one, many.embeddings[0])) < 1e-6, True, "one")


@CHECKS.add("errors: the client's own class")
def _errors(client: Any, model: str) -> None:
    from ollama import ResponseError

    error = catch_error(ResponseError, lambda: chat(client, "nobody"))
    assert_equal((error.status_code, "nobody" in error.error), (404, True), "404")
    error = catch_error(ResponseError, lambda: chat(client, model, options={"mirostat": 2}))
    assert_equal((error.status_code, "mirostat" in error.error), (400, True), "400")
