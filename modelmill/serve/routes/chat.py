"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError
from modelmill.outputs import CompletionOutput, OutputDelta
from modelmill.request_state import RequestState
from modelmill.serve import openai_format
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.openai_format import ChatLogprobsFormatter, sse_event
from modelmill.serve.request_handle import RequestHandle, StreamItem
from modelmill.serve.routes.common import (
    check_message_sizes,
    get_service,
    openai_finish_reason,
    random_id,
    submit_requests,
)
from modelmill.serve.schema import ChatRequest, check_functions
from modelmill.serve.stream import EventFormatter, EventStream, wait_or_disconnect
from modelmill.text import tool_prompts
from modelmill.text.tool_parser import (
    ToolCallDelta,
    ToolParser,
    collect_tool_calls,
    make_tool_parser,
)
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Any:
    """Answer a conversation through the engine's chat template."""
    service = get_service(request)
    engine = service.get_engine(body.model)
    body.check()
    bounds, language = engine.request_limits, engine.text_processor
    engine.check_capacity(body.n or 1)
    _, ticket = await submit_requests(
        request,
        engine,
        chat_request_state,
        language,
        body,
        bounds.max_len,
        get_states=lambda one: [one],
    )
    reply = ChatResponseBuilder(body, ticket, language)
    if body.stream:
        return EventStream(ticket, reply)
    await wait_or_disconnect(request, ticket)
    return await service.run_in_thread(
        lambda: openai_format.Utf8JsonResponse(reply.full_response())
    )


def chat_request_state(
    text_processor: TextProcessor, body: ChatRequest, max_model_len: int
) -> RequestState:
    """The conversation as a request to an engine that takes ``max_model_len`` tokens.

    Raises RequestError.
    """
    if text_processor.chat_format is None:
        raise RequestError(
            "messages need a chat template, which this engine has not; use /v1/completions"
        )
    check_functions(tool.function for tool in body.tools or ())
    check_message_sizes(text_processor, body.messages, max_model_len, body.offered_tools)
    grammar = body.validated_grammar()
    style, offered, params = (
        text_processor.chat_format.tool_style,
        body.offered_tools,
        body.sampling_params(),
    )
    messages, template = tool_prompts.prepare_tools(
        style, body.messages, offered, writes_calls=text_processor.chat_format.writes_calls
    )
    reads = bool(offered) and not body.forces_call
    if reads:
        params = replace(
            params,
            stop=tuple(dict.fromkeys((*params.stop, *tool_prompts.tool_stop_strings(style)))),
        )
    salt = body.cache_salt or ""
    return text_processor.chat_request(
        messages, params, cache_salt=salt, grammar=grammar, calls=reads, **template
    )


def make_chat_tool_parser(body: ChatRequest, text_processor: TextProcessor) -> ToolParser | None:
    """What reads calls out of an answer; None where no tools may be called."""
    names = [tool["function"]["name"] for tool in body.offered_tools]
    if not names or text_processor.chat_format is None:
        return None
    style = tool_prompts.BARE_STYLE if body.forces_call else text_processor.chat_format.tool_style
    most = 1 if body.parallel_tool_calls is False else None
    thinking = body.messages[-1].get("role") == "tool"
    return make_tool_parser(
        style, names, max_calls=most, thinking=thinking, forced=body.forces_call
    )


def is_truncated(output: CompletionOutput) -> bool:
    """Whether an answer that ended might have gone on: its length, or a stop string, ended it."""
    return output.finish_reason != "stop" or isinstance(output.stop_reason, str)


class ChatResponseBuilder(EventFormatter):
    """The response, whole or as events."""

    def __init__(
        self, body: ChatRequest, handle: RequestHandle, text_processor: TextProcessor
    ) -> None:
        self._body, self._handle = body, handle
        self._head = {
            "id": random_id("chatcmpl"),
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self._n = body.n or 1
        self._logprobs = [
            ChatLogprobsFormatter(text_processor.tokenizer, body.top_logprobs or 0)
            for _ in range(self._n)
        ]
        self._tool_parsers = [make_chat_tool_parser(body, text_processor) for _ in range(self._n)]
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        ours = (
            ()
            if text_processor.chat_format is None
            else tool_prompts.tool_stop_strings(text_processor.chat_format.tool_style)
        )
        # one of the format's own stands behind a whole call
        self._truncating_stops = frozenset(stops).difference(ours)
        self._num_calls = [0] * self._n
        self._arguments = [""] * self._n
        self._num_sent_ids = [0] * self._n
        self._tail: dict[str, Any] = {"usage": None} if body.wants_usage else {}
        self._chunk_template = openai_format.ChunkTemplate(self._head, self._tail)

    def _parse_calls(
        self, output: CompletionOutput, text: str, ended: bool
    ) -> tuple[str, list[ToolCallDelta]]:
        """(content, pieces of calls) of a piece of text of one choice."""
        index = output.index
        found = self._tool_parsers[index]
        if found is None:
            return text, []
        pieces = [*found.push(text), *(found.flush(is_truncated(output)) if ended else ())]
        parts = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
        for part in parts:
            self._num_calls[index] += part.name is not None
            self._arguments[index] = (
                "" if part.name is not None else self._arguments[index]
            ) + part.arguments
        return "".join(piece for piece in pieces if isinstance(piece, str)), parts

    def _finish_reason(self, output: CompletionOutput, reason: str | None) -> str | None:
        found, index = openai_finish_reason(reason), output.index
        if found != "stop" or not self._num_calls[index]:
            return found
        # a stop string of the request may end a call in its middle, and a grammar that has no way
        # on; it is none then
        ended = output.stop_reason in self._truncating_stops or self._body.forces_call
        cut = ended and not _is_valid_json(self._arguments[index])
        return "stop" if cut else "tool_calls"

    def full_response(self) -> dict[str, Any]:
        """Everything at once."""
        answer = self._handle.request_states[0].output
        told = {
            **self._head,
            "choices": [self._choice(output) for output in answer.outputs],
            "usage": openai_format.token_usage(self._handle.request_states),
        }
        return (
            {**told, "prompt_token_ids": answer.prompt_token_ids}
            if self._body.return_token_ids
            else told
        )

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        # the token that ended it is no part of the text
        count = len(output.token_ids) - isinstance(output.stop_reason, int)
        content, parts = self._parse_calls(output, output.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parts:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in collect_tool_calls(parts)[1]
            ]
        choice = {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs[output.index].format_next(output, count),
            "finish_reason": self._finish_reason(output, output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        return {**choice, "token_ids": output.token_ids} if self._body.return_token_ids else choice

    def first_events(self) -> bytes:
        """Whose turn it is, for every choice."""
        role = {"role": "assistant", "content": "", "refusal": None}
        prompt = self._handle.request_states[0].output.prompt_token_ids
        told = {"prompt_token_ids": prompt} if self._body.return_token_ids else {}
        return b"".join(
            self._chunk(index, role, None, None, event_fields=told) for index in range(self._n)
        )

    def delta_events(self, items: Sequence[StreamItem]) -> bytes:
        """An event for each delta that says something."""
        return b"".join(self._delta_event(each.delta) for each in items)

    def _delta_event(self, delta: OutputDelta) -> bytes:
        output = delta.output.outputs[delta.index]
        told = self._logprobs[delta.index].format_next(output, len(delta.token_ids))
        ids = self._new_token_ids(output, delta) if self._body.return_token_ids else None
        text, parts = self._parse_calls(output, delta.text, ended=delta.finish_reason is not None)
        if not (text or parts or (told and told["content"]) or delta.finish_reason or ids):
            return b""
        content: dict[str, Any] = (
            {"content": text} if text or not (delta.finish_reason or parts) else {}
        )
        if parts:
            content["tool_calls"] = [_tool_call_delta(part) for part in parts]
        more: dict[str, Any] = {} if ids is None else {"token_ids": ids}
        if delta.finish_reason:
            more["stop_reason"] = output.stop_reason
        return self._chunk(
            delta.index, content, told, self._finish_reason(output, delta.finish_reason), more
        )

    def _new_token_ids(self, output: CompletionOutput, delta: OutputDelta) -> list[int]:
        """Those that a delta adds; with the last one the token that ended it, which has no text."""
        begin = self._num_sent_ids[output.index]
        end = len(output.token_ids) if delta.finish_reason else begin + len(delta.token_ids)
        self._num_sent_ids[output.index] = end
        return output.token_ids[begin:end]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None,
        choice_fields: dict[str, Any] | None = None,
        event_fields: dict[str, Any] | None = None,
    ) -> bytes:
        """choice_fields: more keys of the choice; event_fields: of the event."""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            **(choice_fields or {}),
        }
        if not event_fields:
            return self._chunk_template.render_chunk(choice)
        return sse_event({**self._head, "choices": [choice], **event_fields, **self._tail})

    def last_events(self) -> bytes:
        """The counts where they were asked for, and the end."""
        counts = b""
        if self._body.wants_usage:
            counts = sse_event(
                {
                    **self._head,
                    "choices": [],
                    "usage": openai_format.token_usage(self._handle.request_states),
                }
            )
        return counts + openai_format.DONE


def _is_valid_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _tool_call_delta(part: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call as a stream tells it: the first has its id and its name."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
