"""langchain-anthropic: ChatAnthropic over Anthropic's messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.conformance.client_checks import CITY_SCHEMA, ClientChecks, assert_equal, place_type
from tools.conformance.suite import SuiteResult

TITLE = "langchain-anthropic: ChatAnthropic's answers, streams, tools, structured output, usage"
PACKAGE = "langchain-anthropic"
PROMPT = "Name three fruits, please."
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Weather",
    "input_schema": CITY_SCHEMA,
}
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    from langchain_anthropic import ChatAnthropic

    client = ChatAnthropic(
        model_name=model,
        base_url=base_url.removesuffix("/v1"),
        api_key="none",
        temperature=0,
        max_tokens_to_sample=64,
        max_retries=0,
        timeout=300,
        stop=None,
    )
    return CHECKS.run(client, model)


@CHECKS.add("an answer, whole and streamed, with its usage")
def _answers(client: Any, model: str) -> None:  # noqa: ARG001  the client names it
    whole = client.invoke([("system", "Be brief."), ("user", PROMPT)])
    streamed = None
    for chunk in client.stream([("system", "Be brief."), ("user", PROMPT)]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert_equal(streamed.text, whole.text, "text")
    for name in ("input_tokens", "output_tokens"):
        assert_equal(streamed.usage_metadata[name], whole.usage_metadata[name], name)
    assert_equal(whole.usage_metadata["output_tokens"] > 0, True, "usage")


@CHECKS.add("tools: a forced call and its result")
def _tools(client: Any, model: str) -> None:  # noqa: ARG001  the client names it
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = client.bind_tools([TOOL], tool_choice="weather")
    answer = bound.invoke(PROMPT)
    (call,) = answer.tool_calls
    assert_equal((call["name"], set(call["args"])), ("weather", {"city"}), "call")
    history = [HumanMessage(PROMPT), answer, ToolMessage("Sun", tool_call_id=call["id"])]
    assert_equal(bool(client.bind_tools([TOOL]).invoke(history).content), True, "an answer")


@CHECKS.add("structured output of a pydantic class")
def _structured(client: Any, model: str) -> None:  # noqa: ARG001  the client names it
    output = client.with_structured_output(place_type()).invoke(PROMPT)
    assert_equal(output.city in ("Paris", "Rome"), True, "city")
