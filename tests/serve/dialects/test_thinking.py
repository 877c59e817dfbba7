"""Thinking reaches chat formats that have it, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.dialects.anthropic_schema import MessagesRequest
from modelmill.serve.dialects.ollama_schema import OllamaChatRequest
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.routes.chat import _template_kwargs

CHAT = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})
ON = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize(
    ("marks", "thinks", "budget", "fields"),
    [
        (None, True, 10, {}),
        (("<think>", "</think>"), None, None, {}),
        (("<think>", "</think>"), True, 10, {**ON, "thinking_token_budget": 10}),
        (("<think>", "</think>"), True, None, ON),
        (("<think>", "</think>"), False, 10, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
def test_fields(marks: Any, thinks: bool | None, budget: int | None, fields: Any) -> None:
    processor: Any = SimpleNamespace(chat_format=SimpleNamespace(thinking=marks))
    chat = with_thinking(CHAT, processor, thinks, budget)
    assert {name: getattr(chat, name) for name in fields} == fields
    assert (chat is CHAT) == (not fields)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("marks", [None, ("<|channel|>analysis<|message|>", "<|end|>")])
def test_an_effort_reaches_templates_that_read_it(marks: Any, reads: bool) -> None:
    chat_format = SimpleNamespace(thinking=marks, reads_reasoning_effort=reads)
    processor: Any = SimpleNamespace(chat_format=chat_format)
    ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for body in (
        OllamaChatRequest.model_validate({**ask, "think": "low"}),
        MessagesRequest.model_validate(
            {**ask, "max_tokens": 1, "output_config": {"effort": "low"}}
        ),
    ):
        chat = with_thinking(CHAT, processor, body.thinks, effort=body.effort)
        assert chat.reasoning_effort == ("low" if reads else None)
        assert _template_kwargs(processor, chat).get("reasoning_effort") == chat.reasoning_effort
    assert OllamaChatRequest.model_validate({**ask, "think": True}).effort is None
    assert MessagesRequest.model_validate({**ask, "max_tokens": 1}).effort is None


def test_what_requests_ask_for() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for thinking, thinks in (
        (None, None), ({"type": "enabled", "budget_tokens": 5}, True), ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ):  # fmt: skip
        assert MessagesRequest.model_validate({**body, "thinking": thinking}).thinks is thinks
    for think, thinks in ((None, None), (True, True), ("low", True), (False, False)):
        assert OllamaChatRequest.model_validate({"model": "m", "think": think}).thinks is thinks
    with pytest.raises(ValidationError):
        OllamaChatRequest.model_validate({"model": "m", "think": "perhaps"})
