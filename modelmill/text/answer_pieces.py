"""Pieces of a parsed answer: content, thinking and deltas of tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from modelmill.text.arguments_stream import ArgumentsStream

CALL_ID_PREFIX = "call_"
SHORT_ID_CHARS = 9
"""Letters and digits of the ids that Mistral's templates require, which have no prefix."""


@dataclass(frozen=True)
class ToolCallDelta:
    """A delta of a tool call.

    Attributes:
        index: index of the call in the answer.
        arguments: JSON text to append.
        id: the call's id, in its first delta only.
        name: the tool's name, in its first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ReasoningDelta:
    """Thinking to append."""

    text: str


AnswerPiece = str | ReasoningDelta | ToolCallDelta
"""A string is content."""


BegunPart = Literal["", "reasoning", "content"]
"""What a prompt has begun of the answer, which goes on with it; empty: nothing."""


@dataclass(frozen=True)
class ParsedToolCall:
    """A complete tool call.

    Attributes:
        arguments: JSON text as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A whole answer.

    Attributes:
        reasoning: its thinking.
    """

    content: str = ""
    calls: tuple[ParsedToolCall, ...] = ()
    reasoning: str = ""


def make_openai_tool_call(id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    """A call of a function in a chat message, as OpenAI writes it; arguments: JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def collect_answer(pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
    """Join pieces to the whole answer."""
    content, reasoning = list[str](), list[str]()
    calls, arguments = list[ToolCallDelta](), list[list[str]]()
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
        elif isinstance(piece, ReasoningDelta):
            reasoning.append(piece.text)
        elif piece.name is not None:
            calls.append(piece)
            arguments.append([piece.arguments])
        else:
            arguments[piece.index].append(piece.arguments)
    parsed = (
        ParsedToolCall(call.id or "", call.name or "", "".join(parts))
        for call, parts in zip(calls, arguments, strict=True)
    )
    return ParsedAnswer("".join(content), tuple(parsed), "".join(reasoning))


def collect_content_and_calls(pieces: Iterable[AnswerPiece]) -> tuple[str, list[ParsedToolCall]]:
    """Join pieces to the whole content and the complete calls."""
    answer = collect_answer(pieces)
    return answer.content, list(answer.calls)


class PieceCollector:
    """Collects the pieces of a parser; whitespace beside calls and thinking is not content.

    Attributes:
        num_calls: calls so far.
        follows_call: what comes next stands directly behind a call.
        has_broken_call: the model broke a call, whose rest is in no piece.
    """

    def __init__(
        self,
        max_calls: int | None,
        short_ids: bool,
        silent: bool = False,
        as_written: bool = False,
    ) -> None:
        """Start an answer.

        Args:
            max_calls: further calls are dropped.
            short_ids: ids of nine letters and digits, which Mistral's templates require.
            silent: whether there is content only if no call came and the answer was not cut.
            as_written: whether arguments stay as their reader passes them on, broken ones too.
        """
        self._as_written = as_written
        self._arguments: ArgumentsStream | None = None  # of the last call, while it is open
        self._max_calls = max_calls
        self._short_ids = short_ids
        self._silent = silent
        self._withheld: list[str] = []
        self._blank = ""
        self._pieces: list[AnswerPiece] = []
        self._has_text = self._has_reasoning = False
        self._reasoning_blank = ""
        self.num_calls = 0
        self.follows_call = self.has_broken_call = False

    def set_prefilled_part(self, begun: BegunPart) -> None:
        """Say what the prompt has begun; line breaks that come first then belong to that text."""
        self._has_text, self._has_reasoning = begun == "content", begun == "reasoning"

    def withhold_text(self) -> None:
        """Say that calls are expected: text is content only if none comes (``silent``)."""
        self._silent = True

    def add_text(self, text: str) -> None:
        """Append text to the answer's content."""
        if text.strip():
            self.end_call()
        if self._silent:
            self._withheld.append(text)
            return
        kept = text.rstrip()
        if kept:
            first = not self._has_text
            if first and self.num_calls:
                kept_text = kept.lstrip()
            else:
                kept_text = self._blank + kept
                if first and self._has_reasoning:
                    kept_text = kept_text.lstrip("\n")
            self._pieces.append(kept_text)
            self._blank, self._has_text = "", True
            self.follows_call = False
        self._blank += text[len(kept) :]

    def add_reasoning(self, text: str) -> None:
        """Append to the thinking, without line breaks at both ends."""
        self.end_call()
        text = self._reasoning_blank + text
        if not self._has_reasoning:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        self._reasoning_blank = text[len(kept) :]
        if kept:
            self._has_reasoning = True
            self._pieces.append(ReasoningDelta(kept))

    def end_reasoning(self) -> None:
        """End the thinking; line breaks at its end and before the content are dropped."""
        self._reasoning_blank = ""
        self._has_reasoning = True

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Begin a call of the function ``name``."""
        self.end_call()
        if id is None:
            id = f"{CALL_ID_PREFIX}{secrets.token_hex(12)}"
            if self._short_ids:
                id = secrets.token_hex(SHORT_ID_CHARS)[:SHORT_ID_CHARS]
        self._append_call_delta(ToolCallDelta(self.num_calls, "", id, name))
        self.num_calls += 1
        self.follows_call = True
        self._arguments = None if self._as_written else ArgumentsStream()

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        if not self._as_written:
            text = "" if self._arguments is None else self._arguments.append(text)
        self._append_arguments(text)

    def end_call(self) -> None:
        """End the last call where no limit cut it off: its arguments become valid JSON."""
        if self._arguments is not None:
            self._append_arguments(self._arguments.complete())
            self._arguments = None

    def end_broken_call(self) -> None:
        """End the last call where the model broke it; the rest of it is dropped."""
        self.has_broken_call = True
        self.end_call()

    def _append_arguments(self, text: str) -> None:
        if text:
            self._append_call_delta(ToolCallDelta(self.num_calls - 1, text))

    def _append_call_delta(self, delta: ToolCallDelta) -> None:
        if self._max_calls is not None and delta.index >= self._max_calls:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ToolCallDelta) and last.index == delta.index:
            delta = ToolCallDelta(last.index, last.arguments + delta.arguments, last.id, last.name)
            self._pieces.pop()
        self._pieces.append(delta)

    def drain(self) -> list[AnswerPiece]:
        """Return what was added since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, cut: bool) -> list[AnswerPiece]:
        """Return the rest at the end; cut: the answer was cut off by a limit."""
        # a grammar that forces calls ends inside one only where it has no next token
        if (cut or self._silent) and self._arguments is not None:
            self._append_arguments(self._arguments.take_key_without_value())
        else:
            self.end_call()
        if self._silent and not self.num_calls and not cut:
            self._silent = False
            self.add_text("".join(self._withheld))
        blank = self._blank
        if self._has_reasoning and not self._has_text:
            blank = blank.lstrip("\n")
        if blank and not self.num_calls:
            self._pieces.append(blank)
        return self.drain()
