"""POST /v1/responses: the next items of a conversation, in OpenAI's newer format."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.outputs import CompletionOutput
from modelmill.request_output_state import RequestOutputState
from modelmill.serve import openai_format
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_answer import exhaust_event_generator, streamed_or_whole_response
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.dialects.error_format import responses_error_event
from modelmill.serve.engine_client import max_tokenize_tokens
from modelmill.serve.errors import ApiError
from modelmill.serve.openai_format import ChatLogprobsFormatter, SurrogateSafeJsonResponse
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.response_items import ResponseEvent, ResponseItemsBuilder
from modelmill.serve.response_store import input_as_items
from modelmill.serve.response_store_access import (
    ResponseRecorder,
    previous_response_items,
    resolve_item_references,
    should_store_response,
)
from modelmill.serve.responses_schema import ResponsesRequest
from modelmill.serve.routes.chat import (
    AnswerRecordingParser,
    converted_chat_request_state,
    submit_converted_chat,
)
from modelmill.serve.routes.common import (
    acquire_service_and_engine,
    openai_finish_reason,
    random_id,
)
from modelmill.serve.stream import EventFormatter
from modelmill.text.answer_pieces import ReasoningDelta
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses")
async def responses(body: ResponsesRequest, request: Request) -> Any:
    """Answer a conversation: the same text as /v1/chat/completions returns for it."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    engine.check_capacity(1)
    body, num_earlier = _with_stored_items(request, body)
    prepare = functools.partial(_prepare_chat, num_earlier=num_earlier)
    chat, handle = await submit_converted_chat(request, engine, prepare, body)
    builder = ResponsesBuilder(
        body,
        chat,
        handle,
        engine.text_processor,
        store=ResponseRecorder(service, request, body.input)
        if should_store_response(service, body)
        else None,
    )
    streams, large = bool(body.stream), bool(body.wants_logprobs)
    return await streamed_or_whole_response(
        request, handle, builder, streams=streams, large_events=large
    )


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Any:
    """The number of prompt tokens of a response, without making it."""
    service, engine = await acquire_service_and_engine(request, body.model, body.keep_alive)
    body, num_earlier = _with_stored_items(request, body)
    limit = max_tokenize_tokens(engine.request_limits.max_len)
    _, state = await service.run_in_thread(
        _prepare_chat, engine.text_processor, body, limit, num_earlier
    )
    count = len(state.request.prompt)
    return SurrogateSafeJsonResponse({"object": "response.input_tokens", "input_tokens": count})


def _with_stored_items(request: Request, body: ResponsesRequest) -> tuple[ResponsesRequest, int]:
    """The request with the items that it continues, how many, and those that it refers to.

    Raises:
        ApiError: 400, they are not stored.
    """
    if isinstance(body.input, str) and body.previous_response_id is None:
        return body, 0
    earlier = previous_response_items(request, body.previous_response_id)
    items = resolve_item_references(request, input_as_items(body.input))
    return body.model_copy(update={"input": [*earlier, *items]}), len(earlier)


def _prepare_chat(
    text_processor: TextProcessor, body: ResponsesRequest, max_model_len: int, num_earlier: int = 0
) -> tuple[ChatRequest, RequestOutputState]:
    chat = body.to_chat_request()
    image_field_paths = functools.partial(body.image_field_paths, num_earlier)
    return chat, converted_chat_request_state(
        text_processor, chat, max_model_len, _rename_error_fields, image_field_paths
    )


def _rename_error_fields(text: str) -> str:
    """Rewrite an error message about the chat request to name the fields of this API."""
    for chat_field, field in (
        ("messages[", "input, as messages["),
        ("messages: ", "input: "),
        ("response_format", "text.format"),
    ):
        if text.startswith(chat_field):
            return field + text[len(chat_field) :]
    return text


class ResponsesBuilder(EventFormatter):
    """Builds the response, whole or as events."""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: ChatRequest,
        handle: HttpRequestHandle,
        text_processor: TextProcessor,
        store: ResponseRecorder | None = None,
    ) -> None:
        self._body, self._handle = body, handle
        self._store = store
        warnings = [*body.tool_warnings, *chat.warnings]
        self._warnings = {"warnings": warnings} if warnings else {}
        self._head = {
            "id": random_id("resp", "_"),
            "object": "response",
            "created_at": int(time.time()),
        }
        self._logprobs = ChatLogprobsFormatter(text_processor.tokenizer, body.top_logprobs or 0)
        self._reader = AnswerRecordingParser(chat, text_processor, handle.request_states[0])
        self._items = ResponseItemsBuilder(
            hold_spaces=self._reader.parser is not None,
            client_names_by_offered_name=body.client_names_by_offered_name,
            adds_encrypted_reasoning=body.wants_encrypted_reasoning,
        )
        self._num_events = 0
        self._status = "in_progress"

    def add_stream_items(self, items: Sequence[PromptOutputDelta]) -> None:
        """Add deltas without making events."""
        for each in items:
            exhaust_event_generator(self._stream_item_events(each))

    def first_events(self) -> bytes:
        """The events that the response has begun."""
        response = self.response()
        return self._encode_events(
            {"type": event_type, "response": response}
            for event_type in ("response.created", "response.in_progress")
        )

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """Events of new deltas."""
        return b"".join(self._encode_events(self._stream_item_events(each)) for each in items)

    def terminal_events(self) -> bytes:
        """The whole response, and the end of the stream."""
        return (
            self._encode_events([{"type": f"response.{self._status}", "response": self.response()}])
            + openai_format.DONE_EVENT
        )

    def error_events(self, error: ApiError) -> bytes:
        """The error, and the response so far."""
        self._status = "failed"
        response = {**self.response(), "error": {"code": "server_error", "message": error.message}}
        return self._encode_events(
            [
                responses_error_event(error),
                {"type": "response.failed", "response": response},
            ]
        )

    def _stream_item_events(self, item: PromptOutputDelta) -> Iterable[ResponseEvent]:
        delta = item.delta
        output = delta.output.outputs[0]
        logprobs = self._logprobs.format_next(output, len(delta.token_ids))
        if logprobs is not None:
            self._items.record_logprobs(delta.text, logprobs["content"])
        ended = output if delta.finish_reason is not None else None
        return list(self._emit_text_and_store_when_ended(delta.text, ended, len(delta.token_ids)))

    def _emit_text_and_store_when_ended(
        self, text: str, ended: CompletionOutput | None, num_tokens: int
    ) -> Iterable[ResponseEvent]:
        """Events of new text; arguments as of ``AnswerRecordingParser.parse_text``."""
        pieces = self._reader.parse_text(text, ended, num_tokens)
        for piece in pieces:
            if isinstance(piece, str):
                yield from self._items.add_text(piece)
                continue
            if isinstance(piece, ReasoningDelta):
                if self._body.include_reasoning is not False:
                    yield from self._items.add_reasoning(piece.text)
                continue
            if piece.name is not None:
                yield from self._items.start_call(piece.id or "", piece.name)
            yield from self._items.add_arguments(piece.arguments)
        if ended is not None:
            self._status = (
                "incomplete"
                if openai_finish_reason(ended.finish_reason) == "length"
                else "completed"
            )
            yield from self._items.finish_items(self._status)
            if self._store is not None:
                self._store.store_response(self.response())

    def _encode_events(self, events: Iterable[ResponseEvent]) -> bytes:
        parts = []
        for each in events:
            event_type = each["type"]
            parts.append(
                openai_format.sse_event(
                    {"type": event_type, "sequence_number": self._num_events, **each}, event_type
                )
            )
            self._num_events += 1
        return b"".join(parts)

    def response(self) -> dict[str, Any]:
        """The response so far."""
        body, params = self._body, self._handle.request_states[0].request.params
        ended = self._status in ("completed", "incomplete")
        return {
            **self._head,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self._status == "incomplete"
            else None,
            "model": body.model,
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "output": list(self._items.output),
            "error": None,
            "tools": [tool.to_json() for tool in body.tools or ()],
            "tool_choice": _model_to_dict(body.tool_choice) or "auto",
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": _text_config(body),
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": body.top_logprobs or 0,
            "temperature": params.temperature,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "usage": self._usage() if ended else None,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "store": self._store is not None,
            "background": False,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
            **self._warnings,
        }

    def _usage(self) -> dict[str, Any]:
        counts = openai_format.token_usage(self._handle.request_states)
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }


def _text_config(body: ResponsesRequest) -> dict[str, Any]:
    """The text options as used; verbosity only if the request has it."""
    options = body.text
    format: dict[str, Any] = {"type": "text"}
    if options is not None and options.format is not None:
        format = options.format.model_dump(by_alias=True)
        if format["type"] != "json_schema":
            format = {"type": format["type"]}
    more = (
        {"verbosity": options.verbosity}
        if options is not None and options.verbosity is not None
        else {}
    )
    return {"format": format, **more}


def _model_to_dict(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
