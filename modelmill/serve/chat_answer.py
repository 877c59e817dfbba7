"""One choice of a chat answer as it grows: the internal form that every dialect writes.

A dialect converts its request to a ``ChatRequest`` and its answer from these pieces, so that the
same conversation gets the same text, calls and usage in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response

from modelmill.outputs import OutputDelta
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.routes.chat import AnswerRecordingParser
from modelmill.serve.routes.common import get_service
from modelmill.serve.stream import EventFormatter, EventStream, wait_or_disconnect
from modelmill.serve.tool_call_progress import ToolCallProgress, stop_strings
from modelmill.text.answer_pieces import AnswerPiece, ToolCallDelta
from modelmill.text_processor import TextProcessor

T = TypeVar("T", covariant=True)


class ChatAnswerSplitter:
    """Splits the deltas of one choice into pieces; knows why the answer ended."""

    def __init__(
        self, chat: ChatRequest, text_processor: TextProcessor, state: RequestOutputState
    ) -> None:
        """Start one choice; state: the engine's request, which knows how the prompt ends."""
        self._calls = ToolCallProgress(chat, text_processor)
        self._reader = AnswerRecordingParser(chat, text_processor, state)
        self._stops = stop_strings(chat)
        self._may_call_tools = bool(chat.offered_tools)
        self.finish_reason: str | None = None
        """As OpenAI names it: stop, length or tool_calls; None until the end."""
        self.stop_string: str | None = None
        """The stop string of the request that ended the answer."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking so far."""
        return self._reader.reasoning_tokens

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may have tool calls."""
        return self._may_call_tools

    def split_delta(self, delta: OutputDelta) -> list[AnswerPiece]:
        """Return the pieces of a delta, in order."""
        output = delta.output.outputs[delta.index]
        ended = delta.finish_reason is not None
        pieces = self._reader.parse_text(
            delta.text, output if ended else None, len(delta.token_ids)
        )
        pieces = [piece for piece in pieces if piece != ""]
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self._calls.add_delta(piece)
        if ended:
            self.finish_reason = self._calls.finish_reason(output, output.finish_reason)
            reason = output.stop_reason
            if isinstance(reason, str) and reason in self._stops:
                self.stop_string = reason
        return pieces


class AnswerBuilder(Protocol[T]):
    """What collects a whole answer from the deltas that a stream would send."""

    def add_stream_items(self, items: Sequence[PromptOutputDelta]) -> None:
        """Add deltas without making events."""

    def response(self) -> T:
        """Return the whole answer."""


class StreamableAnswerBuilder(EventFormatter, AnswerBuilder[T], Protocol[T]):
    """An answer that is either collected or sent as events."""


class AnswerCollector(Generic[T]):
    """Waits for an answer that is not streamed; as ``stream.PendingResult``.

    It is made of the same deltas as the events, so that streamed and whole answers agree.
    """

    def __init__(self, handle: HttpRequestHandle, builder: AnswerBuilder[T]) -> None:
        self._handle, self._builder = handle, builder

    async def wait_until_finished(self) -> T:
        """Wait until the answer has finished.

        Raises:
            ModelmillError: the request failed.
        """
        while items := await self._handle.fetch_items():
            self._builder.add_stream_items(items)
        return self._builder.response()

    def close(self) -> None:
        """Abort the request if it has not finished."""
        self._handle.close()


async def streamed_or_whole_response(
    request: Request,
    handle: HttpRequestHandle,
    builder: StreamableAnswerBuilder[Any],
    *,
    streams: bool,
    large_events: bool = False,
) -> Response:
    """The response of a dialect: its events, or one JSON document of the same deltas.

    large_events: make the events on a thread.
    """
    run_in_thread = get_service(request).run_in_thread
    if streams:
        return EventStream(handle, builder, run_in_thread if large_events else None)
    whole = await wait_or_disconnect(request, AnswerCollector(handle, builder))
    return await run_in_thread(SurrogateSafeJsonResponse, whole)


def exhaust_event_generator(events: Iterable[Any]) -> None:
    """Run a generator of events for its effects."""
    for _ in events:
        pass
