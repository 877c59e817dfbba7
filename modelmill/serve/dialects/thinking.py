"""Thinking as other makers' APIs ask for it, as fields of a chat request."""

from __future__ import annotations

from typing import Any

from modelmill.serve.schema import ChatRequest


def thinking_fields(thinks: bool | None, budget_tokens: int | None = None) -> dict[str, Any]:
    """Fields of a chat request that switch thinking on or off.

    Args:
        thinks: None: what the chat template does by itself.
        budget_tokens: at most so many tokens of thinking.

    Returns:
        Only fields that chat requests have.
    """
    fields: dict[str, Any] = {}
    if thinks is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    if thinks and budget_tokens is not None:
        fields["thinking_token_budget"] = budget_tokens
    return {name: value for name, value in fields.items() if name in ChatRequest.model_fields}
