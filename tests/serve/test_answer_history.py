"""The second turn of a conversation repeats the tokens of the first answer, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from modelmill.request_output_state import RequestOutputState
from modelmill.text_processor import TextProcessor
from tests.serve.dialect_calls import post
from tests.serve.service_thread import ServiceThread

# trims contents and writes arguments in its own form, as many templates do
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}{# tools #}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORCED_TOKENS, FREE_TOKENS, THINKING_TOKENS = 330, 24, 4
SECOND_TOKENS = 4


@pytest.fixture(scope="module")
def service(running: ServiceThread) -> Iterator[ServiceThread]:
    with running.other_template(TEMPLATE) as service:
        yield service


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[RequestOutputState]:
    """The engine's requests of conversations, as they come."""
    made: list[RequestOutputState] = []
    make = TextProcessor.chat_request

    def record(self: TextProcessor, *args: Any, **options: Any) -> RequestOutputState:
        made.append(make(self, *args, **options))
        return made[-1]

    monkeypatch.setattr(TextProcessor, "chat_request", record)
    return made


def usage_of(service: ServiceThread, path: str, body: Mapping[str, Any]) -> Any:
    """The usage of an answer."""
    return post(service, path, dict(body)).json["usage"]


def chat(service: ServiceThread, forces: bool, seed: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    limit = FORCED_TOKENS if forces else FREE_TOKENS
    body: dict[str, Any] = {
        "seed": seed,
        "max_tokens": limit,
        "temperature": 0.1 if forces else 1,
        "tools": [tool],
    }
    body |= {"tool_choice": "required" if forces else "auto", "parallel_tool_calls": False}
    if forces:
        body["thinking_token_budget"] = THINKING_TOKENS
    first = post(service, "/v1/chat/completions", {**body, "messages": messages}).json
    message = first["choices"][0]["message"]
    messages.append(message)
    results = [{"role": "tool", "tool_call_id": c["id"]} for c in message.get("tool_calls", ())]
    messages += [{**each, "content": "ok"} for each in results]
    messages.append({"role": "user", "content": "And?"})
    body |= {"messages": messages, "max_tokens": SECOND_TOKENS}
    usage = usage_of(service, "/v1/chat/completions", body)
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


def responses(service: ServiceThread, forces: bool, seed: int) -> None:
    body: dict[str, Any] = {"seed": seed, "temperature": 0.1 if forces else 1.0}
    body["max_output_tokens"] = FORCED_TOKENS if forces else FREE_TOKENS
    body["tools"] = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
    body |= {"tool_choice": "required" if forces else "auto", "parallel_tool_calls": False}
    if forces:
        body["thinking_token_budget"] = THINKING_TOKENS
    items: list[Any] = [{"role": "user", "content": "Hi"}]
    first = post(service, "/v1/responses", {**body, "input": items}).json
    items += first["output"]
    items += [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    items.append({"role": "user", "content": "And?"})
    body |= {"input": items, "max_output_tokens": SECOND_TOKENS}
    usage = usage_of(service, "/v1/responses", body)
    assert usage["input_tokens_details"]["cached_tokens"] > 0


def messages(service: ServiceThread, forces: bool, seed: int) -> None:
    body: dict[str, Any] = {"temperature": 0, "top_k": seed + 1}
    body["max_tokens"] = FORCED_TOKENS if forces else FREE_TOKENS
    body["tools"] = [{"name": "f", "input_schema": PARAMETERS}]
    if forces:
        body["thinking"] = {"type": "enabled", "budget_tokens": THINKING_TOKENS}
    body["tool_choice"] = {"type": "any" if forces else "auto", "disable_parallel_tool_use": True}
    sent: list[Any] = [{"role": "user", "content": "Hi"}]
    first = post(service, "/v1/messages", {**body, "messages": sent}).json
    sent.append({"role": "assistant", "content": first["content"]})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    sent.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
    body |= {"messages": sent, "max_tokens": SECOND_TOKENS}
    assert usage_of(service, "/v1/messages", body)["cache_read_input_tokens"] > 0


def ollama(service: ServiceThread, forces: bool, seed: int) -> None:
    """It has no tool_choice; a schema gives JSON in the content."""
    options = {"seed": seed, "temperature": 0.1 if forces else 1.0}
    options["num_predict"] = FORCED_TOKENS if forces else FREE_TOKENS
    body: dict[str, Any] = {"stream": False, "options": options}
    if forces:
        body["format"] = PARAMETERS
    sent: list[Any] = [{"role": "user", "content": "Hi"}]
    first = post(service, "/api/chat", {**body, "messages": sent}).json
    sent += [first["message"], {"role": "user", "content": "And?"}]
    body["options"] = {**options, "num_predict": SECOND_TOKENS}
    post(service, "/api/chat", {**body, "messages": sent})


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}


@pytest.mark.parametrize("forces", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_next_prompt_has_the_tokens_of_the_answer(
    service: ServiceThread, states: list[RequestOutputState], dialect: str, forces: bool
) -> None:
    for seed in range(3):
        states.clear()
        DIALECTS[dialect](service, forces, seed)
        first, second = states
        ids = first.output.outputs[0].token_ids
        ids = ids[:-1] if ids[-1] in first.request.eos_ids else ids
        if forces and dialect != "ollama":
            assert first.output.outputs[0].finish_reason == "stop", first.output.outputs[0].text
            assert "</tool_call>" in first.output.outputs[0].text
        computed = [*first.request.prompt, *ids]
        assert list(second.request.prompt[: len(computed)]) == computed
        assert second.output.cached_tokens >= (len(computed) - 1) // 16 * 16 - 16


def test_without_the_memory_the_prompt_differs(
    service: ServiceThread, states: list[RequestOutputState], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = service.engine.text_processor
    monkeypatch.setattr(processor, "_answer_history", processor._answer_history)  # restores it
    processor.set_answer_history_capacity(0)
    chat(service, True, 0)
    first, second = states
    computed = [*first.request.prompt, *first.output.outputs[0].token_ids[:-1]]
    assert list(second.request.prompt[: len(computed)]) != computed
