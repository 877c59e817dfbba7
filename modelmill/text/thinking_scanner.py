"""Finds the thinking in the text of an answer: stop strings of a chat are not for it."""

from __future__ import annotations

from dataclasses import dataclass

from modelmill.text.answer_grammar import PromptThinking
from modelmill.text.answer_pieces import BegunPart
from modelmill.text.chat_syntax import ChatSyntax, ThinkingSyntax
from modelmill.text.harmony import START_TOKEN
from modelmill.text.tool_call_reader import (
    find_first_mark,
    is_whitespace,
    longest_suffix_overlap_length,
    opening_marks,
)


@dataclass(frozen=True)
class AnswerThinkingSyntax:
    """Where an answer may have thinking.

    Attributes:
        open: mark before it.
        ends: marks of which the first ends it.
        begun: whether the prompt began it.
        repeats: whether it may come again behind content; else it is at the begin alone.
    """

    open: str
    ends: tuple[str, ...]
    begun: bool
    repeats: bool


def make_answer_thinking_syntax(
    syntax: ChatSyntax,
    thinking: ThinkingSyntax | None,
    prompt_thinking: PromptThinking,
    begun: BegunPart,
    calls: bool,
) -> AnswerThinkingSyntax | None:
    """Return where an answer may have thinking; None if it has none.

    Args:
        syntax: how the answer is written.
        thinking: marks of the thinking, if the template has them.
        prompt_thinking: what the prompt says of it.
        begun: what the prompt has begun of the answer.
        calls: whether the answer may have calls of tools.
    """
    repeats = syntax.calls.style == "harmony"
    if thinking is None or (begun == "content" and not repeats):
        return None
    opening, closing = thinking.marks
    ends = [closing, *([START_TOKEN] if repeats else [])]
    if thinking.ends_at_calls and calls:
        ends += opening_marks(syntax.calls)
    return AnswerThinkingSyntax(opening, tuple(ends), prompt_thinking == "open", repeats)


class ThinkingScanner:
    """Splits a text that arrives in pieces into thinking, with its marks, and the rest.

    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, scope: AnswerThinkingSyntax) -> None:
        self._scope = scope
        self._inside, self._at_start, self._over = scope.begun, not scope.begun, False
        self._buffer = ""
        self._blanks: list[str] = []

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text; return what is certain now: texts, and whether each is thinking."""
        if self._at_start and not self._buffer and is_whitespace(text):
            self._blanks.append(text)  # decides nothing: looked at once
            return []
        self._buffer += text
        if self._at_start and not self._detect_start():
            return []
        spans: list[tuple[str, bool]] = []
        while self._buffer and self._take_span(spans):
            pass
        return spans

    def flush(self) -> list[tuple[str, bool]]:
        """Return what is still buffered when the text ends."""
        rest = "".join((*self._blanks, self._buffer))
        self._buffer, self._blanks = "", []
        return [(rest, self._inside)] if rest else []

    def _detect_start(self) -> bool:
        """Detect whether the text begins with thinking; returns whether that is certain."""
        begin, mark = self._buffer.lstrip(), self._scope.open
        if not begin or (len(begin) < len(mark) and mark.startswith(begin)):
            return False
        self._inside, self._at_start = begin.startswith(mark), False
        self._over = not (self._inside or self._scope.repeats)
        self._buffer, self._blanks = "".join((*self._blanks, self._buffer)), []
        return True

    def _take_span(self, spans: list[tuple[str, bool]]) -> bool:
        """Add the next text to the spans; returns whether another may follow."""
        if self._over:
            spans.append((self._buffer, False))
            self._buffer = ""
            return False
        marks = self._scope.ends if self._inside else (self._scope.open,)
        place, mark = find_first_mark(self._buffer, marks)
        if place < 0:
            size = len(self._buffer) - longest_suffix_overlap_length(self._buffer, marks)
        else:
            # the mark before and the mark behind the thinking belong to it
            size = place + (len(mark) if self._inside else 0)
        if size:
            spans.append((self._buffer[:size], self._inside))
        self._buffer = self._buffer[size:]
        if place < 0:
            return False
        self._over = self._inside and not self._scope.repeats
        self._inside = not self._inside
        return True
