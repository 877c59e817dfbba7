"""Reading one block of tool calls: what the styles of calls share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from modelmill.text.answer_pieces import PieceCollector
from modelmill.text.chat_syntax import CallSyntax
from modelmill.text.json_normalizer import StreamingJsonNormalizer, suffix_overlap
from modelmill.text.tool_schema_cache import ToolSchemaCache

ToolSchemas = Mapping[str, Mapping[str, Any] | None]
"""Names of the tools → JSON schema of their parameters."""
MAX_HEAD_CHARS = 256
"""Maximum characters of a call's name with what stands around it."""
MAX_KEY_CHARS = 1024
"""Maximum characters of an argument's key with the mark behind it, in pieces and at once."""
MAX_CACHED_SEARCHES = 1024
"""Searches for marks that are kept; some have names of a request's tools in them."""
_BLANKS = re.compile(r"[\s\u0120\u010a]+")
"""Blanks, also as the letters that stand for them in byte-level vocabularies (broken decoders)."""
_PARTS = re.compile(r"<[|｜][^<>\s]*[|｜]>|<[^<\s]*|[^<\s]+")


@cache
def split_mark_parts(mark: str) -> tuple[str, ...]:
    """Split a mark at blanks, before "<" and behind control tokens, where whitespace may differ."""
    return tuple(_PARTS.findall(mark))


def skip_whitespace(text: str, at: int) -> int:
    """Return the position of the next character that is no whitespace."""
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def is_whitespace(text: str) -> bool:
    """Whether a text is whitespace, and not empty."""
    return _BLANKS.fullmatch(text) is not None


def find_first_mark(text: str, marks: tuple[str, ...], at: int = 0) -> tuple[int, str]:
    """Return position and text of the first mark; (-1, "") if there is none."""
    match = _compile_mark_search(marks)(text, at)
    return (match.start(), match[0]) if match else (-1, "")


def longest_suffix_overlap_length(text: str, marks: tuple[str, ...]) -> int:
    """Return how many characters at the end of the text may begin one of the marks."""
    begins, longest = _first_char_search_and_max_length(marks)
    if begins(text, max(0, len(text) - longest + 1)) is None:
        return 0
    return max((suffix_overlap(text, mark) for mark in marks), default=0)


@lru_cache(MAX_CACHED_SEARCHES)
def _compile_mark_search(marks: tuple[str, ...]) -> Callable[[str, int], re.Match[str] | None]:
    """A search for the first mark; of two at one place for the earlier one in the tuple."""
    return re.compile("|".join(map(re.escape, marks)) or "(?!)").search


@lru_cache(MAX_CACHED_SEARCHES)
def _first_char_search_and_max_length(
    marks: tuple[str, ...],
) -> tuple[Callable[[str, int], re.Match[str] | None], int]:
    """A search for a character with which a mark begins, and the length of the longest mark."""
    chars = "".join(sorted({re.escape(mark[0]) for mark in marks if mark}))
    pattern = re.compile(f"[{chars}]" if chars else "(?!)")
    return pattern.search, max(map(len, marks), default=0)


def opening_marks(syntax: CallSyntax) -> tuple[str, ...]:
    """Return the marks in content at which calls may begin."""
    begins = (syntax.section[0], syntax.call[0])
    if syntax.whole_marks:
        first = [each.strip() for each in begins]
    else:
        first = [part for each in begins for part in split_mark_parts(each)[:1]]
    first += syntax.openers
    # models write blanks before the bracket of a list
    first = [part.rstrip("[") if part[:1] == "<" else part for part in first]
    optional = (syntax.code_mark, syntax.optional[0], *syntax.inline)
    # a bracket alone begins calls only at the begin of the content
    return tuple(dict.fromkeys(mark for mark in (*first, *optional) if len(mark) > 1))


class ToolCallReader(ABC):
    """Reads one block of calls and passes them to a collector.

    A state (``_state``) consumes text from a position and returns the next one; the same position
    without a new state means that more text is needed.

    Attributes:
        openers: marks in content at which a block may begin.
        closed: the block is complete; what follows is content.
        rejected: the text since the last call is none; ``take_non_call_text`` returns it.
        num_calls: calls so far.
        cut: the answer was cut off by a limit.
        lacks_call: the mark of a section came, and behind it no mark of a call.
    """

    _state: Callable[[str, int], int]

    def __init__(self, syntax: CallSyntax, tools: ToolSchemas, output: PieceCollector) -> None:
        self._syntax, self._tools, self._output = syntax, tools, output
        self._schemas = ToolSchemaCache(tools)
        self._section, self._section_close = map(split_mark_parts, syntax.section)
        self._open, self._close = map(split_mark_parts, syntax.call)
        whole = syntax.whole_marks
        self.openers = opening_marks(syntax)
        parts = (self._close, self._section_close)
        self._call_end, self._section_end = (
            marks[1].strip() if whole else "".join(each[-1:])
            for marks, each in zip((syntax.call, syntax.section), parts, strict=True)
        )
        self._ends = tuple(dict.fromkeys(filter(None, (self._call_end, self._section_end))))
        self.closed = self.rejected = self.cut = False
        self.num_calls = 0
        self._pending: list[str] = []
        self._undeclared: list[str] = []  # calls of undeclared functions since the last call
        self._drops = self._final = False
        self.begin_block()

    def restrict_opening_marks(self, marks: tuple[str, ...]) -> None:
        """Let a block begin at these marks only."""
        self.openers = marks

    def begin_block(self) -> None:
        """Begin a block at its first mark."""
        self.closed = self.rejected = self.lacks_call = False
        self.num_calls = 0
        self._pending, self._undeclared = [], []
        self._state = self._reset_to_first_state()

    @abstractmethod
    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        """The state at the first mark of a block."""

    def feed(self, text: str, at: int, final: bool = False) -> int:
        """Consume text; returns the next position.

        Args:
            text: of the answer.
            at: position in it.
            final: whether the answer ends with the text.
        """
        self._final = final
        while not (self.closed or self.rejected):
            state, before = self._state, at
            self._drops = False
            at = state(text, at)
            if not self._drops and at > before:
                self._pending.append(text[before:at])
            if at == before and self._state == state:
                break
        return at

    def mark_answer_end(self, cut: bool) -> None:
        """Say that nothing follows; cut: the answer was cut off by a limit."""
        self.cut = cut

    def take_non_call_text(self) -> str:
        """Return the consumed text that is no call."""
        pending, self._pending = "".join(self._pending), []
        return pending

    def _emit_call_begin(self, name: str, id: str | None = None) -> None:
        if not self.num_calls and self._undeclared:
            self._output.add_text("".join(self._undeclared))
        self._undeclared = []
        self.num_calls += 1
        self._output.begin_call(name, id)

    def _add_undeclared_call(self, text: str) -> None:
        """A call of an undeclared function in a list is content, on a line of its own.

        Before the first call it waits: without one, the list is content with its marks.

        Args:
            text: the call as it is written.
        """
        self._undeclared.append(f"{text}\n")
        if self.num_calls:
            self._output.add_text(self._undeclared[-1])
            self._drop_pending_as_call()

    def _drop_pending_as_call(self) -> None:
        """What was consumed so far, with what the current state consumes, belongs to a call."""
        self._pending = []
        self._drops = True

    def _drop_consumed_text(self) -> None:
        """What the current state consumes is a mark."""
        self._drops = True

    def _reject_block(self, at: int) -> int:
        self.rejected = True
        return at

    def _mark_block_closed(self, at: int) -> int:
        self.closed = True
        return at

    def _match_parts(self, text: str, at: int, parts: tuple[str, ...]) -> tuple[int, int | None]:
        """Match parts in order, with any whitespace before each; a part may be missing.

        Returns:
            The number of matched parts, and the position after the last one; None if more text is
            needed.
        """
        count = 0
        for part in parts:
            place = skip_whitespace(text, at)
            if text.startswith(part, place):
                at, count = place + len(part), count + 1
            elif not self._final and part.startswith(text[place:]):
                return count, None
            elif place < len(text) and part.startswith(text[place:]):
                return count, len(text)  # a mark that the end of the answer cut off
        return count, at

    def _match_marks_then(
        self, text: str, at: int, parts: tuple[str, ...], following: Callable[[str, int], int]
    ) -> int:
        """Match marks; after them comes ``following``."""
        _, place = self._match_parts(text, at, parts)
        if place is None:
            return at
        self._state = following
        return place

    def _match_block_end(self, text: str, at: int, parts: tuple[str, ...]) -> int:
        """Match the marks after the last call; the block is then complete."""
        _, place = self._match_parts(text, at, parts)
        if place is None:
            return at
        self._drop_consumed_text()
        self.closed = True
        return place

    def _emit_value_so_far(
        self, value: StreamingJsonNormalizer, at: int, following: Callable[[str, int], int]
    ) -> int:
        """Pass on what was read of a value up to ``at``; after its end comes ``following``."""
        self._output.add_arguments(value.drain_json())
        self._drop_pending_as_call()
        if value.failed:
            self._end_broken_call_and_skip_rest()
        elif value.done:
            self._state = following
        return at

    def _delegate_to_reader(self, reader: ToolCallReader, text: str, at: int) -> int:
        """Let a reader of another style read the whole block; its calls are this one's."""
        reader.mark_answer_end(self.cut)
        at = reader.feed(text, at, self._final)
        self.num_calls = reader.num_calls
        self.closed, self.rejected = reader.closed, reader.rejected
        if self.num_calls:
            self._drop_pending_as_call()
            if self.closed or self.rejected or self._final:
                self._pending = [reader.take_non_call_text()]
        return at

    def _tool_requires_arguments(self, name: str) -> bool:
        """Whether a tool is known to require some."""
        return not self._schemas.has_required_arguments(name, frozenset())

    def _tool_requires_no_arguments(self, name: str) -> bool:
        """Whether a tool is known to require none."""
        is_known = self._tools.get(name) is not None
        return is_known and self._schemas.has_required_arguments(name, frozenset())

    def _end_broken_call_and_skip_rest(self) -> None:
        """The arguments of a call are broken: they end here."""
        self._output.end_broken_call()
        self._state = self._skip_broken_call

    def _end_broken_call(self, _mark: str) -> None:
        """A mark ends a broken call, and by default its block."""
        self.closed = True

    def _skip_broken_call(self, text: str, at: int) -> int:
        """Discard the rest of a call whose arguments are broken."""
        self._drop_pending_as_call()
        ends = (*self._ends, *self.openers)
        place, mark = find_first_mark(text, ends, at)
        if place >= 0:
            self._end_broken_call(mark)
            return place + len(mark) if mark in self._ends else place
        return (
            len(text)
            if self._final
            else max(at, len(text) - longest_suffix_overlap_length(text, ends))
        )
