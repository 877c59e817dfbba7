"""Calls with the name between marks, then the arguments as one value."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelmill.text.answer_pieces import PieceCollector
from modelmill.text.call_reader import (
    MAX_HEAD_CHARS,
    CallReader,
    ToolSchemas,
    find_first,
    skip_blank,
    split_mark,
)
from modelmill.text.chat_syntax import CallSyntax
from modelmill.text.json_calls import JsonCallReader
from modelmill.text.parameter_types import declares_string, takes_arguments
from modelmill.text.value_stream import JsonValueConverter, StringPaths, split_object


class NamedCallReader(CallReader):
    """Reads calls whose arguments are one value."""

    def __init__(self, syntax: CallSyntax, tools: ToolSchemas, output: PieceCollector) -> None:
        super().__init__(syntax, tools, output)
        if syntax.json_too:
            json_syntax = CallSyntax(
                "json",
                call=("", syntax.call[1]),
                section=("", syntax.section[1]),
                declared_types=syntax.declared_types,
                bare=True,
            )
            self._json_calls = JsonCallReader(json_syntax, tools, output)

    def _first_state(self) -> Callable[[str, int], int]:
        syntax = self._syntax
        self._head = re.compile(syntax.head_pattern)
        self._name_end = split_mark(syntax.name_end)
        empty_ends = (syntax.empty_end,) if syntax.empty_end else ()
        self._head_ends = (
            *(*self._name_end[:1], *self._argument_starts(), *empty_ends),
            *(self._close[:1] if self._may_end_at_name else ()),
        )
        self._arguments = JsonValueConverter(syntax.string_mark)
        self._name = self._begun = ""
        self._id: str | None = None
        self._has_section = self._is_begun = False
        return self._scan_section

    @property
    def _may_end_at_name(self) -> bool:
        """Whether models may leave out the braces of a call without arguments."""
        return bool(self._syntax.string_mark)

    def _argument_starts(self) -> tuple[str, ...]:
        return ("{",)

    def _scan_section(self, text: str, at: int) -> int:
        place = self._match_marks(text, at, self._section, self._scan_open)
        self._has_section = place > at
        return place

    def _scan_open(self, text: str, at: int) -> int:
        """The marks before a call; the last one must not be missing."""
        _, place = self._match(text, at, self._open)
        if place is None:
            return at
        if self._open and (place == at or not text[:place].endswith(self._open[-1])):
            if self._has_section:
                start = skip_blank(text, at)
                if self._syntax.json_too and text[start : start + 1] in ("[", "{"):
                    return self._begin_objects(start)
                self._commit_call_text()  # the mark of a section without a call is no text
                self.dropped_section = True
            return self._reject(at)
        return self._begin_head(place)

    def _begin_head(self, at: int) -> int:
        self._state = self._scan_head if not self._syntax.json_too else self._scan_style
        return at

    def _scan_style(self, text: str, at: int) -> int:
        """Detect whether objects stand instead of name and arguments."""
        start = skip_blank(text, at)
        if start == len(text):
            return self._reject(at) if self._final else at
        self._state = self._scan_head
        return self._begin_objects(start) if text[start] in "[{" else start

    def _begin_objects(self, at: int) -> int:
        self._json_calls.begin()
        self._state = self._scan_objects
        return at

    def _scan_objects(self, text: str, at: int) -> int:
        return self._delegate_to(self._json_calls, text, at)

    def _scan_head(self, text: str, at: int) -> int:
        """The name with what stands around it."""
        start = skip_blank(text, at)
        place, mark = find_first(text, self._head_ends, start)
        if place < 0 and len(text) - start < MAX_HEAD_CHARS and not self._final:
            return at
        head = text[start : max(place, 0)].strip()
        match = self._head.fullmatch(head) if place >= 0 else None
        name = "" if match is None else self._declared_name(self._unescape(match["name"]))
        counts = self._syntax.counter_alone and head.isdecimal()
        if match is None or place - start > MAX_HEAD_CHARS or not (name in self._tools or counts):
            return self._reject(at)
        groups = match.groupdict()
        self._name, self._begun, self._is_begun = "" if counts else name, "", False
        self._id = head if self._syntax.id_from_head else groups.get("id")
        if mark == self._syntax.empty_end:
            return self._end_empty_call(place + len(mark))
        if self._may_end_at_name and mark in self._close and self._needs_arguments(name):
            return self._reject(at)
        self._state = self._scan_name_end
        return place

    def _declared_name(self, name: str) -> str:
        """Return a name as written, without what a format's models write behind it."""
        return name

    def _unescape(self, text: str) -> str:
        """Return a name or a key as its tool declares it."""
        return text

    def _end_empty_call(self, at: int) -> int:
        """A call without arguments ends at a position."""
        self._begin_value()
        self._output.add_arguments("{}")
        self._state = self._scan_next
        return at

    def _scan_name_end(self, text: str, at: int) -> int:
        self._arguments = JsonValueConverter(self._syntax.string_mark, self._string_paths())
        return self._match_marks(text, at, self._name_end, self._scan_arguments)

    def _string_paths(self) -> StringPaths | None:
        """Which values are declared as strings, where strings have marks that a model may omit."""
        if not self._syntax.string_mark:
            return None
        schema = self._tools.get(self._name)
        return lambda path: bool(path) and declares_string(schema, path[0], path[1:])

    def _scan_arguments(self, text: str, at: int) -> int:
        place = skip_blank(text, at)
        if place == len(text):
            return self._reject(at) if self._final else at
        if text[place] == "{":
            if self._name:
                self._begin_value()
            self._state = self._scan_value
            return place
        count, end = self._match(text, at, self._close)
        if end is None:
            return at
        if not count or not self._name:
            return self._reject(at)
        return self._end_empty_call(end)

    def _scan_value(self, text: str, at: int) -> int:
        value = self._arguments
        at = value.feed(text, at, self._final)
        if self._is_begun:
            return self._forward_value(value, at, self._scan_close)
        self._begun += value.take()
        if value.failed:
            return self._reject(at)
        if not value.done:
            return at
        self._name = self._tool_for_arguments(self._begun)
        if not self._name:
            return self._reject(at)
        self._begin_value()
        self._output.add_arguments(self._begun)
        return self._forward_value(value, at, self._scan_close)

    def _begin_value(self) -> None:
        self._begin_call(self._name, self._id)
        self._commit_call_text()
        self._is_begun = True

    def _tool_for_arguments(self, arguments: str) -> str:
        """The one tool that takes these arguments; "" if it is none or not certain."""
        keys = {key for key, _ in split_object(arguments) or ()}
        names = [name for name, schema in self._tools.items() if takes_arguments(schema, keys)]
        return names[0] if len(names) == 1 else ""

    def _scan_close(self, text: str, at: int) -> int:
        self._commit_call_text()
        return self._match_marks(text, at, self._close, self._scan_next)

    def _scan_next(self, text: str, at: int) -> int:
        """After a call: another one, the end of the section, or content."""
        if not self._section_close and not self._has_section:
            return self._end_block(at)
        place = skip_blank(text, at)
        separator = self._syntax.separator.strip()
        separated = bool(separator) and text.startswith(separator, place)
        if separated:
            place = skip_blank(text, place + len(separator))
        if place == len(text) and not (self._final and separated):
            return self._end_block(at) if self._final else at
        rest = text[place:]
        if separator.startswith(rest) or (separated and self._open[0].startswith(rest)):
            if not self._final:
                return at
            if self.cut:  # inside the marks before another call
                self._discard_consumed()
                return self._end_block(len(text))
        for part in (*self._open[:1], *self._syntax.openers):
            if rest.startswith(part):
                self._discard_consumed()
                self._state = self._scan_open
                return place
            if part.startswith(rest) and not self._final:
                return at
        return self._close_block(text, at, self._section_close)
