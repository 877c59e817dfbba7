"""Writes the pieces of a chat's answer: thinking apart from the answer, and each call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from modelmill.cli.chat_tools import format_call
from modelmill.cli.terminal_chat import WordWrapper, terminal_width
from modelmill.text.answer_pieces import (
    AnswerPiece,
    ParsedAnswer,
    ReasoningDelta,
    ToolCallDelta,
    collect_answer,
)

THINKING_BEGINS, THINKING_ENDS = "[thinking] ", "\n[answer] "


class TerminalAnswerWriter:
    """Writes an answer as it grows, and collects it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """write: shows text at once."""
        self._write = write
        self._wrapped = WordWrapper(terminal_width if sys.stdout.isatty() else lambda: sys.maxsize)
        self._pieces: list[AnswerPiece] = []
        self._thinking = False

    def add(self, pieces: Sequence[AnswerPiece], *, shown: bool) -> None:
        """Collect pieces; ``shown``: write them at once, else the end of the answer does."""
        self._pieces += pieces
        if shown:
            self._write_pieces(pieces)

    def finish_and_collect_answer(self, *, stopped: bool, shown: bool) -> ParsedAnswer:
        """Write the rest and the calls, and return the whole answer.

        Args:
            stopped: the user ended it; its calls, which may be cut, are left out.
            shown: as in ``add``: the pieces have been written.
        """
        if not shown:
            self._write_pieces(self._pieces)
        self._write(self._wrapped.flush() + (" [stopped]\n" if stopped else "\n"))
        answer = collect_answer(self._pieces)
        if stopped:
            return ParsedAnswer(answer.content, (), answer.reasoning)
        for call in answer.calls:
            self._write(format_call(call) + "\n")
        return answer

    def _write_pieces(self, pieces: Sequence[AnswerPiece]) -> None:
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                continue
            thinking = isinstance(piece, ReasoningDelta)
            if thinking != self._thinking:
                self._thinking = thinking
                label = THINKING_BEGINS if thinking else THINKING_ENDS
                self._write(self._wrapped.feed(label))
            text = piece.text if isinstance(piece, ReasoningDelta) else piece
            self._write(self._wrapped.feed(text))
