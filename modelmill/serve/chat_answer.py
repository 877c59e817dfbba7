"""One choice of a chat answer as it grows: the internal form that every dialect writes.

A dialect converts its request to a ``ChatRequest`` and its answer from these pieces, so that the
same conversation gets the same text, calls and usage in each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from modelmill.outputs import CompletionOutput, OutputDelta
from modelmill.request_state import RequestState
from modelmill.serve.request_handle import RequestHandle, StreamItem
from modelmill.serve.routes.chat import is_truncated, make_chat_tool_parser
from modelmill.serve.routes.common import openai_finish_reason
from modelmill.serve.schema import ChatRequest
from modelmill.text.answer_pieces import AnswerPiece, ToolCallDelta
from modelmill.text_processor import TextProcessor

T = TypeVar("T", covariant=True)


class ChatAnswer:
    """Splits the deltas of one choice into pieces; knows why the answer ended."""

    def __init__(
        self, chat: ChatRequest, text_processor: TextProcessor, state: RequestState
    ) -> None:
        """Start one choice; state: the engine's request, which knows how the prompt ends."""
        self._forces_call = chat.forces_call
        self._parser = make_chat_tool_parser(chat, text_processor, state)
        self._stops = frozenset([chat.stop] if isinstance(chat.stop, str) else chat.stop or ())
        self._may_call = bool(chat.offered_tools)
        self._num_calls = 0
        self._arguments = ""
        self.finish_reason: str | None = None
        """As OpenAI names it: stop, length or tool_calls; None until the end."""
        self.stop_string: str | None = None
        """The stop string of the request that ended the answer."""

    @property
    def may_call(self) -> bool:
        """Whether the answer may have tool calls."""
        return self._may_call

    def push(self, delta: OutputDelta) -> list[AnswerPiece]:
        """Return the pieces of a delta, in order."""
        output = delta.output.outputs[delta.index]
        ended = delta.finish_reason is not None
        pieces = self._split(delta.text, output if ended else None)
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self._num_calls += piece.name is not None
                begins = piece.name is not None
                self._arguments = ("" if begins else self._arguments) + piece.arguments
        if ended:
            self.finish_reason = self._finish_reason(output)
            reason = output.stop_reason
            if isinstance(reason, str) and reason in self._stops:
                self.stop_string = reason
        return pieces

    def _split(self, text: str, ended: CompletionOutput | None) -> list[AnswerPiece]:
        if self._parser is None:
            return [text] if text else []
        pieces = self._parser.push(text)
        if ended is not None:
            pieces += self._parser.flush(is_truncated(ended))
        return [piece for piece in pieces if piece != ""]

    def _finish_reason(self, output: CompletionOutput) -> str | None:
        reason = openai_finish_reason(output.finish_reason)
        if reason != "stop" or not self._num_calls:
            return reason
        # a stop string or the end of a grammar inside a call leaves no call that can be made
        may_be_cut = output.stop_reason in self._stops or self._forces_call
        return "stop" if may_be_cut and not is_json(self._arguments) else "tool_calls"


def is_json(text: str) -> bool:
    """Whether a text is valid JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class AnswerBuilder(Protocol[T]):
    """What collects a whole answer from the deltas that a stream would send."""

    def consume(self, items: Sequence[StreamItem]) -> None:
        """Add deltas without making events."""

    def response(self) -> T:
        """Return the whole answer."""


class AnswerCollector(Generic[T]):
    """Waits for an answer that is not streamed; as ``stream.PendingResponse``.

    It is made of the same deltas as the events, so that streamed and whole answers agree.
    """

    def __init__(self, handle: RequestHandle, builder: AnswerBuilder[T]) -> None:
        self._handle, self._builder = handle, builder

    async def finish(self) -> T:
        """Wait until the answer has finished.

        Raises:
            ModelmillError: the request failed.
        """
        while items := await self._handle.fetch():
            self._builder.consume(items)
        return self._builder.response()

    def close(self) -> None:
        """Abort the request if it has not finished."""
        self._handle.close()


def exhaust(events: Iterable[Any]) -> None:
    """Run a generator of events for its effects."""
    for _ in events:
        pass
