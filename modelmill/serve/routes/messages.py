"""POST /v1/messages and /v1/messages/count_tokens: conversations in Anthropic's format."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from modelmill.request_output_state import RequestOutputState
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_answer import ChatAnswerSplitter, streamed_or_whole_response
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.dialects.anthropic_answer import AnthropicMessageBuilder
from modelmill.serve.dialects.anthropic_models import ANTHROPIC_ERRORS
from modelmill.serve.dialects.anthropic_schema import CountTokensRequest, MessagesRequest
from modelmill.serve.dialects.thinking import with_thinking
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.routes.chat import converted_chat_request_state, submit_converted_chat
from modelmill.serve.routes.common import acquire_service_and_engine
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute, responses=ANTHROPIC_ERRORS)


@router.post("/v1/messages")
async def messages(body: MessagesRequest, request: Request) -> Any:
    """Answer a conversation: the same text as /v1/chat/completions returns for it."""
    _, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    engine.check_capacity(1)
    chat, handle = await submit_converted_chat(request, engine, prepare_chat, body)
    answer = ChatAnswerSplitter(chat, engine.text_processor, handle.request_states[0])
    builder = AnthropicMessageBuilder(
        body.model,
        body.max_tokens,
        answer,
        handle,
        chat.warnings,
        omits_thinking=body.omits_thinking,
    )
    return await streamed_or_whole_response(request, handle, builder, streams=bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Any:
    """The number of prompt tokens of a conversation with its tools."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    limit = max_tokenize_tokens(engine.request_limits.max_len)
    _, state = await service.run_in_thread(prepare_chat, engine.text_processor, body, limit)
    return SurrogateSafeJsonResponse({"input_tokens": len(state.request.prompt)})


def prepare_chat(
    text_processor: TextProcessor, body: CountTokensRequest, max_model_len: int
) -> tuple[ChatRequest, RequestOutputState]:
    """Convert a request to a chat request and a request of the engine.

    Raises:
        RequestError: it is invalid.
    """
    budget = None if body.thinking is None else body.thinking.budget_tokens
    chat = with_thinking(body.to_chat_request(), text_processor, body.thinks, budget, body.effort)
    return chat, converted_chat_request_state(
        text_processor, chat, max_model_len, _rename_error_fields, body.image_field_paths
    )


def _rename_error_fields(text: str) -> str:
    """Rewrite an error about the chat request to name the fields of this API."""
    if text.startswith("messages["):
        return f"messages, as {text}"
    return text.replace("response_format", "output_config.format")
