"""GET and DELETE /v1/responses/{id}, and POST /v1/responses/compact."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from modelmill.core.errors import RequestError
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compaction import SUMMARY_PROMPT, compacted_items
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.discriminated_unions import make_converted_request
from modelmill.serve.openai_format import Utf8JsonResponse, token_usage
from modelmill.serve.response_input_items import Order, list_input_items
from modelmill.serve.response_recorder import (
    previous_response_items,
    request_owner,
    resolve_item_references,
)
from modelmill.serve.response_store import input_as_items
from modelmill.serve.responses_schema import CompactRequest, items_to_messages
from modelmill.serve.routes.chat import chat_request_state, make_chat_tool_parser
from modelmill.serve.routes.common import (
    acquire_engine,
    get_service,
    prepare_and_submit_requests,
    random_id,
)
from modelmill.serve.stream import wait_or_disconnect
from modelmill.text.answer_pieces import collect_answer
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)
bodyless_router = APIRouter()
"""Routes without a body."""


@bodyless_router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A stored response."""
    store = get_service(request).response_store
    return dict(store.get(request_owner(request), response_id).response)


@bodyless_router.get("/v1/responses/{response_id}/input_items")
async def retrieve_input(
    request: Request,
    response_id: str,
    order: Order = "desc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: str | None = None,
) -> dict[str, Any]:
    """The input of a stored response, the newest item first."""
    stored = get_service(request).response_store.get(request_owner(request), response_id)
    return list_input_items(stored, order, limit, after)


@bodyless_router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a stored response."""
    get_service(request).response_store.delete(request_owner(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/compact")
async def compact(body: CompactRequest, request: Request) -> Any:
    """Summarize a conversation: the items to go on with in place of it."""
    _, engine = await acquire_engine(request, body.model, body.keep_alive)
    engine.check_capacity(1)
    items = [
        *previous_response_items(request, body.previous_response_id),
        *resolve_item_references(request, input_as_items(body.input or [])),
    ]
    if not items:
        raise RequestError("input is empty; give items, or previous_response_id")
    (chat, state), handle = await prepare_and_submit_requests(
        request,
        engine,
        _make_summary_request,
        body,
        items,
        engine.request_limits.max_len,
        get_states=lambda prepared: [prepared[1]],
    )
    await wait_or_disconnect(request, handle)
    text = state.output.outputs[0].text
    summary = _strip_thinking(chat, engine.text_processor, state, text).strip()
    if not summary:
        raise RequestError(
            "the model wrote no summary, so that the conversation would be lost; keep it as it is, "
            "or allow more max_output_tokens"
        )
    counts = token_usage([state])
    return Utf8JsonResponse(
        {
            "id": random_id("resp", "_"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": compacted_items(items, random_id("cmp", "_"), summary),
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {
                    **counts["prompt_tokens_details"], "cache_write_tokens": 0,
                },
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }
    )  # fmt: skip


def _make_summary_request(
    text_processor: TextProcessor, body: CompactRequest, items: list[Any], max_model_len: int
) -> tuple[ChatRequest, RequestOutputState]:
    messages = items_to_messages(items, body.instructions)
    chat = make_converted_request(
        ChatRequest,
        {
            "model": body.model,
            "messages": [*messages, {"role": "user", "content": SUMMARY_PROMPT}],
            "max_completion_tokens": body.max_output_tokens,
            "cache_salt": body.cache_salt,
        },
    )
    chat.check()
    chat = with_thinking(chat, text_processor, False)
    return chat, chat_request_state(text_processor, chat, max_model_len)


def _strip_thinking(
    chat: ChatRequest, text_processor: TextProcessor, state: RequestOutputState, text: str
) -> str:
    """The text without the thinking of a model whose template has no switch for it."""
    parser = make_chat_tool_parser(chat, text_processor, state)
    if parser is None:
        return text
    return collect_answer([*parser.push(text), *parser.flush()]).content
