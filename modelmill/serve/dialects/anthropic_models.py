"""Response models of /v1/messages, for the OpenAPI document and to check responses in tests."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from modelmill.serve.engine_client import EngineClient
from modelmill.serve.errors import invalid_request
from modelmill.serve.response_model import ResponseModel

ANTHROPIC_VERSION_HEADER = "anthropic-version"
"""The header by which Anthropic's clients are known on paths that OpenAI's clients share."""
DEFAULT_MODEL_PAGE, MAX_MODEL_PAGE = 20, 1000
"""Models of one page of the list."""


class MessageText(ResponseModel):
    """A text of the model."""

    type: Literal["text"]
    text: str


class MessageThinking(ResponseModel):
    """What the model wrote before its answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(ResponseModel):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str = Field(pattern="^toolu_")
    name: str
    input: dict[str, Any]


class MessageOutputTokens(ResponseModel):
    """Parts of the output's tokens."""

    thinking_tokens: int = Field(description="of the thinking and the mark that ends it")


class MessageUsage(ResponseModel):
    """Token counts; tokens from the prefix cache are not input tokens."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokens


class MessageResponse(ResponseModel):
    """Response body of POST /v1/messages."""

    id: str = Field(pattern="^msg_")
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[
        Annotated[MessageText | MessageThinking | MessageToolUse, Field(discriminator="type")]
    ]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage
    warnings: list[str] = Field(default_factory=list)


class CountTokensResponse(ResponseModel):
    """Response body of POST /v1/messages/count_tokens."""

    input_tokens: int


def anthropic_model_card(name: str, engine: EngineClient, longest: int | None) -> dict[str, Any]:
    """Describe a served engine as Anthropic's API describes models.

    Args:
        name: by which it is asked for.
        engine: to describe.
        longest: tokens of its context; None: not known before it is loaded.
    """
    created = datetime.datetime.fromtimestamp(engine.created_at, datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
    }


def anthropic_model_page(
    cards: Sequence[dict[str, Any]], limit: int | None, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """Return one page of the list of models.

    Args:
        cards: all of them.
        limit: how many at most; None: as many as Anthropic's API sends by default.
        after_id: the page begins behind this one.
        before_id: the page ends before this one.

    Raises:
        ApiError: 400, there is no such model, or both are given.
    """
    if after_id is not None and before_id is not None:
        raise invalid_request("after_id and before_id exclude each other", "before_id")
    size, ids = limit or DEFAULT_MODEL_PAGE, [card["id"] for card in cards]
    for name, id in (("after_id", after_id), ("before_id", before_id)):
        if id is not None and id not in ids:
            raise invalid_request(f"{name}: there is no model {id[:80]!r}", name)
    if before_id is not None:
        end = ids.index(before_id)
        begin = max(end - size, 0)
        has_more = begin > 0
    else:
        begin = 0 if after_id is None else ids.index(after_id) + 1
        end = begin + size
        has_more = end < len(ids)
    shown = ids[begin:end] or [None]
    return {
        "data": list(cards[begin:end]),
        "has_more": has_more,
        "first_id": shown[0],
        "last_id": shown[-1],
    }


class AnthropicErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Body of every error of these paths."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorResponse}
    for status in (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
}
"""Errors in the OpenAPI document, in place of those of the other paths."""
