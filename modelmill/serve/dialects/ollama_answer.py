"""Answers of /api/chat and /api/generate: a JSON object, or a line for each piece."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from modelmill.outputs import OutputDelta
from modelmill.serve.errors import ApiError
from modelmill.serve.gil_yielding_json_serializer import dump_json
from modelmill.serve.openai_format import ChatLogprobsFormatter
from modelmill.serve.request_handle import HttpRequestHandle, PromptOutputDelta
from modelmill.serve.routes.common import openai_finish_reason
from modelmill.serve.stream import EventFormatter
from modelmill.serve.tool_call_progress import is_json
from modelmill.text.answer_pieces import AnswerPiece, ReasoningDelta, ToolCallDelta

NANOSECONDS_PER_SECOND = 1_000_000_000


class AnswerSplitter(Protocol):
    """Splits deltas into pieces; as ``ChatAnswerSplitter``."""

    finish_reason: str | None

    def split_delta(self, delta: OutputDelta) -> list[AnswerPiece]:
        """Return the pieces of a delta."""


class PlainTextSplitter:
    """The text of a completion, in which nothing is parsed."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None

    def split_delta(self, delta: OutputDelta) -> list[AnswerPiece]:
        """Return the text of a delta."""
        self.finish_reason = openai_finish_reason(delta.finish_reason)
        return [delta.text] if delta.text else []


class OllamaAnswerBuilder(EventFormatter):
    """Builds the answer, whole or as lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        model: str,
        splitter: AnswerSplitter,
        handle: HttpRequestHandle,
        logprobs: ChatLogprobsFormatter,
        *,
        is_chat: bool,
        warnings: Sequence[str] = (),
    ) -> None:
        """Start the answer.

        Args:
            model: as the client names it.
            splitter: splits deltas into pieces.
            handle: of the request.
            logprobs: formats log-probabilities, if they are requested.
            is_chat: the pieces make up a ``message``, else a ``response``.
            warnings: what of the request was not enforced.
        """
        self._model, self._splitter, self._handle = model, splitter, handle
        self._is_chat, self._logprobs = is_chat, logprobs
        self._warnings = {"warnings": list(warnings)} if warnings else {}
        self._text = ""
        self._thinking = ""
        self._calls: list[dict[str, Any]] = []
        self._entries: list[Any] = []
        self._open_call: ToolCallDelta | None = None
        self._arguments = ""

    def add_stream_items(self, items: Sequence[PromptOutputDelta]) -> None:
        """Add deltas without making lines."""
        for item in items:
            text, thinking, calls, entries = self._split_item(item)
            self._text += text
            self._thinking += thinking
            self._calls += calls
            self._entries += entries

    def response(self) -> dict[str, Any]:
        """The whole answer."""
        content = self._content_fields(self._text, self._thinking, self._calls, self._entries)
        return {**self._common_fields(), **content, **self._final_fields()}

    def first_events(self) -> bytes:
        """Nothing: lines begin with text."""
        return b""

    def delta_events(self, items: Sequence[PromptOutputDelta]) -> bytes:
        """A line for each delta with content."""
        return b"".join(map(_encode_line, self._delta_lines(items)))

    def terminal_events(self) -> bytes:
        """The last line, with counts and times."""
        return _encode_line(
            {
                **self._common_fields(),
                **self._content_fields("", "", [], []),
                **self._final_fields(),
            }
        )

    def error_events(self, error: ApiError) -> bytes:
        """The error, in place of the rest."""
        return _encode_line({"error": error.message})

    def keepalive(self) -> bytes:
        """A line without text, since clients parse every line."""
        content = self._content_fields("", "", [], [])
        return _encode_line({**self._common_fields(), **content, "done": False})

    def _delta_lines(self, items: Sequence[PromptOutputDelta]) -> Iterator[dict[str, Any]]:
        for item in items:
            parts = self._split_item(item)
            if any(parts):
                yield {**self._common_fields(), **self._content_fields(*parts), "done": False}

    def _split_item(
        self, item: PromptOutputDelta
    ) -> tuple[str, str, list[dict[str, Any]], list[Any]]:
        """Return the text, thinking, complete calls and log-probabilities of a delta."""
        text, thinking, calls = "", "", list[dict[str, Any]]()
        delta = item.delta
        for piece in self._splitter.split_delta(delta):
            if isinstance(piece, str):
                text += piece
            elif isinstance(piece, ReasoningDelta):
                thinking += piece.text
            else:
                if piece.name is not None:
                    calls += self._take_complete_call()
                    self._open_call, self._arguments = piece, ""
                self._arguments += piece.arguments
        if delta.finish_reason is not None:
            calls += self._take_complete_call()
        output = delta.output.outputs[delta.index]
        logprobs = self._logprobs.format_next(output, len(delta.token_ids))
        return text, thinking, calls, [] if logprobs is None else logprobs["content"]

    def _take_complete_call(self) -> list[dict[str, Any]]:
        """The open call, if it is complete: arguments are an object here, so a part is none."""
        call, self._open_call = self._open_call, None
        if call is None or not is_json(self._arguments):
            return []
        function = {
            "index": call.index,
            "name": call.name,
            "arguments": json.loads(self._arguments),
        }
        return [{"id": call.id, "function": function}]

    def _content_fields(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: list[Any]
    ) -> dict[str, Any]:
        thought = {"thinking": thinking} if thinking else {}
        entries = {"logprobs": logprobs} if logprobs else {}
        if not self._is_chat:
            return {"response": text, **thought, **entries}
        made = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thought, **made}, **entries}

    def _common_fields(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": format_timestamp()}

    def _final_fields(self) -> dict[str, Any]:
        reason = self._splitter.finish_reason
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **counts_and_durations(self._handle),
            **self._warnings,
        }


def counts_and_durations(handle: HttpRequestHandle) -> dict[str, int]:
    """Token counts, and times in nanoseconds."""
    output = handle.request_states[0].output
    total, first = output.seconds or 0.0, output.first_token_seconds or output.seconds or 0.0
    return {
        "total_duration": int(total * NANOSECONDS_PER_SECOND),
        "load_duration": 0,
        "prompt_eval_count": len(output.prompt_token_ids),
        "prompt_eval_duration": int(
            max(first - (handle.queue_seconds or 0), 0) * NANOSECONDS_PER_SECOND
        ),
        "eval_count": sum(len(each.token_ids) for each in output.outputs),
        "eval_duration": int(max(total - first, 0) * NANOSECONDS_PER_SECOND),
    }


def format_timestamp(seconds: float | None = None) -> str:
    """A time in Ollama's format; None: now."""
    utc = datetime.UTC
    moment = (
        datetime.datetime.now(utc)
        if seconds is None
        else datetime.datetime.fromtimestamp(seconds, utc)
    )
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def load_or_unload_response(
    model: str, is_chat: bool, reason: str, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """The answer to a request without a prompt, which only loads or unloads a model."""
    content: dict[str, Any] = (
        {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    )
    head = {"model": model, "created_at": format_timestamp()}
    warned = {"warnings": list(warnings)} if warnings else {}
    return {**head, **content, "done": True, "done_reason": reason, **warned}


def _encode_line(value: dict[str, Any]) -> bytes:
    return dump_json(value) + b"\n"
