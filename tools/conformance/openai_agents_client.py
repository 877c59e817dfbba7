"""openai-agents: runs of agents over responses and chat completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tools.conformance.client_checks import CITY_SCHEMA, ClientChecks, assert_equal, place_type
from tools.conformance.suite import SuiteResult

TITLE = "openai-agents: runs over responses and chat; streams, forced tools, structured output"
PACKAGE = "openai-agents"
PROMPT = "Name three fruits, please."
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    from agents import set_tracing_disabled

    set_tracing_disabled(True)
    return CHECKS.run(base_url, model)


def models(base_url: str, model: str) -> dict[str, Any]:
    """The server as both of the library's model classes; made in the running event loop."""
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    return {
        "responses": OpenAIResponsesModel(model, client),
        "chat": OpenAIChatCompletionsModel(model, client),
    }


def agent(model: Any, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """An agent with greedy answers."""
    from agents import Agent, ModelSettings

    chosen = ModelSettings(**{"temperature": 0, "max_tokens": 64, **(settings or {})})
    return Agent("fruits", instructions="Be brief.", model=model, model_settings=chosen, **options)


async def output_of(one: Any, **options: Any) -> Any:
    """The final output of a run."""
    from agents import Runner

    return (await Runner.run(one, PROMPT, **options)).final_output


def in_loop(check: Coroutine[Any, Any, None]) -> None:
    """Run a check."""
    asyncio.run(check)


@CHECKS.add("a run is the same text over responses and chat, whole and streamed")
def _text(base_url: str, model: str) -> None:
    from agents import Runner

    async def check() -> None:
        texts = {}
        for name, each in models(base_url, model).items():
            texts[name] = await output_of(agent(each))
            streamed = Runner.run_streamed(agent(each), PROMPT)
            async for _ in streamed.stream_events():
                pass
            assert_equal(streamed.final_output, texts[name], f"{name}: streamed")
        assert_equal(len({text.strip() for text in texts.values()}), 1, f"texts {texts}")

    in_loop(check())


@CHECKS.add("tools: a forced call runs the function")
def _tools(base_url: str, model: str) -> None:
    from agents import FunctionTool

    cities: list[str] = []

    async def weather(_: Any, arguments: str) -> str:
        cities.append(json.loads(arguments)["city"])
        return "Sun"

    async def check() -> None:
        for name, each in models(base_url, model).items():
            tool = FunctionTool("weather", "Weather of a city", CITY_SCHEMA, weather)
            forced = agent(
                each,
                {"tool_choice": "weather"},
                tools=[tool],
                tool_use_behavior="stop_on_first_tool",
            )
            assert_equal(await output_of(forced), "Sun", f"{name}: output")
        assert_equal(len(cities), 2, "calls")
        assert_equal(set(cities) <= {"Paris", "Rome"}, True, f"arguments {cities}")

    in_loop(check())


@CHECKS.add("structured output: a pydantic class over responses and chat")
def _structured(base_url: str, model: str) -> None:
    place = place_type()

    async def check() -> None:
        for name, each in models(base_url, model).items():
            output = await output_of(agent(each, output_type=place))
            assert_equal(output.city in ("Paris", "Rome"), True, name)

    in_loop(check())
