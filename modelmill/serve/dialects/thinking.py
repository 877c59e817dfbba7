"""Thinking as other makers' APIs ask for it, as fields of a chat request."""

from __future__ import annotations

from typing import Any

from modelmill.serve.chat_schema import ChatRequest
from modelmill.text.thinking_switch import ENABLE_THINKING_VARIABLE
from modelmill.text_processor import TextProcessor


def with_thinking(
    chat: ChatRequest,
    text_processor: TextProcessor,
    thinks: bool | None,
    budget_tokens: int | None = None,
    effort: str | None = None,
) -> ChatRequest:
    """Switch the thinking of a chat request on or off; a model that cannot think is left alone.

    Args:
        chat: the request.
        text_processor: of the engine.
        thinks: None: what the chat template does by itself.
        budget_tokens: at most so many tokens of thinking.
        effort: how much to think, for templates that read it.
    """
    chat_format, fields = text_processor.chat_format, dict[str, Any]()
    if effort is not None and getattr(chat_format, "reads_reasoning_effort", False):
        fields["reasoning_effort"] = effort
    # a chat format names the marks of its thinking, if it has any
    if thinks is not None and getattr(chat_format, "thinking", None) is not None:
        options = chat.chat_template_kwargs or {}
        fields["chat_template_kwargs"] = {**options, ENABLE_THINKING_VARIABLE: thinks}
        if thinks and budget_tokens is not None:
            fields["thinking_token_budget"] = budget_tokens
    return chat.model_copy(update=fields) if fields else chat
