"""Answers of /v1/messages: content blocks as they grow, whole or as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from modelmill.request_output_state import RequestOutputState
from modelmill.serve.chat_answer import ChatAnswerSplitter, exhaust_event_generator
from modelmill.serve.dialects.anthropic_blocks import to_tool_use_id
from modelmill.serve.dialects.error_format import anthropic_error
from modelmill.serve.encrypted_content_codec import compress_text
from modelmill.serve.errors import ApiError
from modelmill.serve.openai_format import sse_event
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.routes.common import random_id
from modelmill.serve.stream import EventFormatter
from modelmill.text.answer_pieces import ReasoningDelta

Event = dict[str, Any]
PING_EVENT: Event = {"type": "ping"}
THINKING_SIGNATURE = "modelmill"
"""Ends every block of thinking. Nothing is signed, but clients keep thinking for the next turn only
if it has a signature (Vercel's AI SDK, and OpenCode with it)."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicBlocksBuilder:
    """Collects text, thinking and calls as blocks; ``content`` has the complete ones.

    With ``hold_spaces``, leading spaces are held until other text follows, since they may precede
    a call, and a block of spaces alone is refused when it comes back. With ``omits_thinking``, the
    signature of a block of thinking has its text, packed, and the block none.
    """

    def __init__(self, hold_spaces: bool, omits_thinking: bool = False) -> None:
        self._omits_thinking = omits_thinking
        self.content: list[dict[str, Any]] = []
        self._hold_spaces = hold_spaces
        self._held_spaces = ""
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []

    def add_text(self, text: str) -> Iterator[Event]:
        """Add text of the answer."""
        text = self._held_spaces + text
        self._held_spaces = ""
        if self._hold_spaces and not self._is_open("text") and not text.strip():
            self._held_spaces = text
            return
        if text:
            yield from self._append_to_block(
                "text", text, {"type": "text_delta", "text": text}, {"text": ""}
            )

    def add_thinking(self, text: str) -> Iterator[Event]:
        """Add text that precedes the answer."""
        if text:
            delta = None if self._omits_thinking else {"type": "thinking_delta", "thinking": text}
            yield from self._append_to_block(
                "thinking", text, delta, {"thinking": "", "signature": ""}
            )

    def start_call(self, id: str, name: str) -> Iterator[Event]:
        """Begin a call."""
        self._held_spaces = ""
        yield from self.close_block()
        block = {"type": "tool_use", "id": to_tool_use_id(id), "name": name, "input": {}}
        yield self._start_block(block)

    def add_arguments(self, text: str) -> Iterator[Event]:
        """Add JSON text to the input of the call."""
        assert self._is_open("tool_use"), "arguments belong to a call"
        if text:
            self._text.append(text)
            yield self._make_delta_event({"type": "input_json_delta", "partial_json": text})

    def flush_and_close_block(self) -> Iterator[Event]:
        """End the last block."""
        if self._held_spaces and not (self.content or self._open):
            spaces, self._held_spaces, self._hold_spaces = self._held_spaces, "", False
            yield from self.add_text(spaces)
        yield from self.close_block()

    def close_block(self) -> Iterator[Event]:
        """End the open block, if there is one."""
        block, text = self._open, "".join(self._text)
        if block is None:
            return
        index = len(self.content)
        if block["type"] == "tool_use":
            block = {**block, "input": parse_tool_input(text)}
        elif block["type"] == "thinking" and self._omits_thinking:
            block = {**block, "signature": compress_text(text)}
        elif block["type"] == "thinking":
            block = {**block, "thinking": text, "signature": THINKING_SIGNATURE}
        else:
            block = {**block, block["type"]: text}
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield self._make_delta_event(delta)
        self.content.append(block)
        self._open, self._text = None, []
        yield {"type": "content_block_stop", "index": index}

    def _append_to_block(
        self, block_type: str, text: str, delta: Event | None, empty: dict[str, str]
    ) -> Iterator[Event]:
        if not self._is_open(block_type):
            yield from self.close_block()
            yield self._start_block({"type": block_type, **empty})
        self._text.append(text)
        if delta is not None:
            yield self._make_delta_event(delta)

    def _is_open(self, block_type: str) -> bool:
        return self._open is not None and self._open["type"] == block_type

    def _start_block(self, block: dict[str, Any]) -> Event:
        self._open = block
        return {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _make_delta_event(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}


def parse_tool_input(text: str) -> dict[str, Any]:
    """The input of a call; of a call that was cut off, what is complete.

    The client's library does the same with the deltas of a stream.
    """
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class AnthropicMessageBuilder(EventFormatter):
    """Builds the message, whole or as events.

    ``message_start`` comes with the first token: only then it is known how much of the prompt was
    in the prefix cache.
    """

    def __init__(
        self, model: str, max_tokens: int, answer: ChatAnswerSplitter, handle: HttpRequestHandle,
        warnings: Sequence[str] = (), *, omits_thinking: bool = False,
    ) -> None:  # fmt: skip
        self._answer, self._handle, self._max_tokens = answer, handle, max_tokens
        self._warnings = {"warnings": list(warnings)} if warnings else {}
        self._head = {
            "id": random_id("msg", "_"),
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._blocks = AnthropicBlocksBuilder(
            hold_spaces=answer.may_call_tools, omits_thinking=omits_thinking
        )
        self._started = self._pinged = False

    def add_stream_items(self, items: Sequence[PromptOutputDelta]) -> None:
        """Add deltas without making events."""
        for item in items:
            exhaust_event_generator(self._stream_item_events(item))

    def response(self) -> dict[str, Any]:
        """The whole message."""
        return {
            **self._head,
            "content": list(self._blocks.content),
            **self._stop_fields(),
            "usage": self._usage(),
            **self._warnings,
        }

    def first_events(self) -> bytes:
        """Nothing: see the class."""
        return b""

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """Events of new deltas, after ``message_start``."""
        events = [event for item in items for event in self._stream_item_events(item)]
        return b"".join(
            map(_encode_event, [*self._start_events(), *self._with_ping_after_first_block(events)])
        )

    def terminal_events(self) -> bytes:
        """Why the answer ended, and the end of the stream."""
        ends: list[Event] = [
            {"type": "message_delta", "delta": self._stop_fields(), "usage": self._usage()},
            {"type": "message_stop"},
        ]
        return b"".join(map(_encode_event, [*self._start_events(), *ends]))

    def error_events(self, error: ApiError) -> bytes:
        """The error, in place of the rest."""
        return _encode_event(anthropic_error(error))

    def keepalive(self) -> bytes:
        """A ping, as the maker's own server sends it."""
        return _encode_event(PING_EVENT)

    def _start_events(self) -> Iterator[Event]:
        if self._started:
            return
        self._started = True
        usage = message_usage(self._handle.request_states[0]) | {"output_tokens": 0}
        message = {
            **self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
            **self._warnings,
        }  # fmt: skip
        yield {"type": "message_start", "message": message}

    def _with_ping_after_first_block(self, events: Sequence[Event]) -> Iterator[Event]:
        """The events, with a ping after the first block has begun."""
        for event in events:
            yield event
            if not self._pinged and event["type"] == "content_block_start":
                self._pinged = True
                yield PING_EVENT

    def _stream_item_events(self, item: PromptOutputDelta) -> Iterator[Event]:
        for piece in self._answer.split_delta(item.delta):
            if isinstance(piece, str):
                yield from self._blocks.add_text(piece)
            elif isinstance(piece, ReasoningDelta):
                yield from self._blocks.add_thinking(piece.text)
            else:
                if piece.name is not None:
                    yield from self._blocks.start_call(piece.id or "", piece.name)
                yield from self._blocks.add_arguments(piece.arguments)
        if item.delta.finish_reason is not None:
            yield from self._blocks.flush_and_close_block()

    def _usage(self) -> dict[str, Any]:
        """The token counts so far."""
        thinking = {"thinking_tokens": self._answer.reasoning_tokens}
        usage = message_usage(self._handle.request_states[0])
        return {**usage, "output_tokens_details": thinking}

    def _num_output_tokens(self) -> int:
        return message_usage(self._handle.request_states[0])["output_tokens"]

    def _stop_fields(self) -> dict[str, Any]:
        answer = self._answer
        if answer.finish_reason == "stop" and answer.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
        reason = _STOP_REASONS.get(answer.finish_reason or "")
        if reason == "max_tokens" and self._num_output_tokens() < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}


def message_usage(state: RequestOutputState) -> dict[str, int]:
    """Token counts; tokens from the prefix cache are not input tokens, as the maker counts.

    Nothing is charged for writing to the cache, and how much of a prompt stays in it is not known
    when the answer ends: ``cache_creation_input_tokens`` is 0.
    """
    output = state.output
    return {
        "input_tokens": len(output.prompt_token_ids) - output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": sum(len(each.token_ids) for each in output.outputs),
    }


def _encode_event(event: Mapping[str, Any]) -> bytes:
    return sse_event(event, event["type"])
