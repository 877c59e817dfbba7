"""pydantic-ai: agents over OpenAI's chat and responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.conformance.client_checks import ClientChecks, assert_equal, place_type
from tools.conformance.suite import FailedCheck, SuiteResult

TITLE = "pydantic-ai: agents over chat and responses; streams, tools, structured output"
PACKAGE = "pydantic-ai-slim"
PROMPT = "Name three fruits, please."
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 64, "timeout": 300}
NO_MESSAGES_REASON = (
    'pydantic-ai 2.31 does not run with anthropic 2.x: its AnthropicModel ends with "Cannot '
    'instantiate typing.Union" before it sends anything; anthropic_client and '
    "langchain_anthropic_client check this API"
)
CHECKS = ClientChecks()


def run(base_url: str, model: str, out: Path) -> SuiteResult:  # noqa: ARG001  the suite leaves no logs
    """Every check by itself."""
    result = CHECKS.run(base_url, model)
    result.excluded.append(FailedCheck("agents over Anthropic's messages", NO_MESSAGES_REASON))
    return result


def models(base_url: str, model: str) -> dict[str, Any]:
    """The server as each of the library's model classes."""
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=base_url, api_key="none")
    return {
        "chat": OpenAIChatModel(model, provider=openai),
        "responses": OpenAIResponsesModel(model, provider=openai),
    }


def agent(model: Any, **options: Any) -> Any:
    """An agent with greedy answers."""
    from pydantic_ai import Agent

    return Agent(model, model_settings=SETTINGS, **options)


@CHECKS.add("an agent's answer is the same text over every API")
def _answers(base_url: str, model: str) -> None:
    answers = {
        name: agent(each, instructions="Be brief.").run_sync(PROMPT)
        for name, each in models(base_url, model).items()
    }
    texts = {name: answer.output.strip() for name, answer in answers.items()}
    assert_equal(len(set(texts.values())), 1, f"texts {texts}")
    for name, answer in answers.items():
        assert_equal(answer.usage.output_tokens > 0, True, f"{name}: usage")


@CHECKS.add("a stream is the whole answer, over every API")
def _streams(base_url: str, model: str) -> None:
    for name, each in models(base_url, model).items():
        stream = agent(each).run_stream_sync(PROMPT)
        streamed = "".join(stream.stream_text(delta=True))
        whole = agent(each).run_sync(PROMPT).output
        assert_equal(streamed.strip(), whole.strip(), name)


@CHECKS.add("structured output: the schema as a forced tool and as a native format")
def _structured(base_url: str, model: str) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    place = place_type()
    for name, each in models(base_url, model).items():
        for mode in (NativeOutput, ToolOutput):
            output = agent(each, output_type=mode(place), retries=0).run_sync(PROMPT).output
            assert_equal(output.city in ("Paris", "Rome"), True, f"{name} {mode.__name__}")


@CHECKS.add("tools: a call in the history and its result, over every API")
def _tools(base_url: str, model: str) -> None:
    from pydantic_ai.messages import (
        ModelRequest,
        ModelResponse,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )

    call = ToolCallPart("weather", {"city": "Rome"}, tool_call_id="call_1")
    history = [
        ModelRequest(parts=[UserPromptPart(PROMPT)]),
        ModelResponse(parts=[call]),
        ModelRequest(parts=[ToolReturnPart("weather", "Sun", tool_call_id="call_1")]),
    ]

    def weather(city: str) -> str:
        """Weather of a city."""
        return f"Sun in {city}"

    for name, each in models(base_url, model).items():
        answer = agent(each, tools=[weather]).run_sync("And now?", message_history=history)
        assert_equal(bool(answer.output), True, name)
