"""Calls with the name between marks, then the arguments as one value."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from modelmill.text.answer_pieces import PieceCollector
from modelmill.text.chat_syntax import CallSyntax
from modelmill.text.gemma_to_json import GemmaToJsonConverter
from modelmill.text.json_call_reader import JsonCallReader
from modelmill.text.json_normalizer import (
    StreamingJsonNormalizer,
    StringPathPredicate,
    split_json_object,
)
from modelmill.text.tool_call_reader import (
    MAX_HEAD_CHARS,
    ToolCallReader,
    ToolSchemas,
    find_first_mark,
    skip_whitespace,
    split_mark_parts,
)


class NamedCallReader(ToolCallReader):
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

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        syntax = self._syntax
        self._head = re.compile(syntax.head_pattern)
        self._name_end = split_mark_parts(syntax.name_end)
        empty_ends = (syntax.empty_end,) if syntax.empty_end else ()
        self._head_ends = (
            *(*self._name_end[:1], *self._argument_start_marks(), *empty_ends),
            *(self._close[:1] if self._may_omit_empty_braces else ()),
        )
        self._arguments = StreamingJsonNormalizer()
        self._name = self._begun = ""
        self._id: str | None = None
        self._has_section = self._is_begun = False
        return self._scan_section_mark

    @property
    def _may_omit_empty_braces(self) -> bool:
        """Whether models may leave out the braces of a call without arguments."""
        return bool(self._syntax.string_mark)

    def _argument_start_marks(self) -> tuple[str, ...]:
        return ("{",)

    def _scan_section_mark(self, text: str, at: int) -> int:
        place = self._match_marks_then(text, at, self._section, self._scan_opening_marks)
        self._has_section = place > at
        return place

    def _scan_opening_marks(self, text: str, at: int) -> int:
        """The marks before a call; the last one must not be missing."""
        _, place = self._match_parts(text, at, self._open)
        if place is None:
            return at
        if self._open and (place == at or not text[:place].endswith(self._open[-1])):
            if self._has_section:
                start = skip_whitespace(text, at)
                if self._syntax.json_too and text[start : start + 1] in ("[", "{"):
                    return self._enter_json_objects(start)
                return self._scan_empty_section(text, at)
            return self._reject_block(at)
        return self._enter_call_head(place)

    def _scan_empty_section(self, text: str, at: int) -> int:
        """The mark of a section without a call is no text if the section's end follows."""
        count, place = self._match_parts(text, at, self._section_close)
        if place is None:
            return at
        is_end = self._final and skip_whitespace(text, at) == len(text)
        if count < max(1, len(self._section_close)) and not is_end:
            self.lacks_call = True
            return self._reject_block(at)
        self._drop_pending_as_call()
        return self._mark_block_closed(place)

    def _enter_call_head(self, at: int) -> int:
        self._state = (
            self._scan_call_head if not self._syntax.json_too else self._detect_json_objects
        )
        return at

    def _detect_json_objects(self, text: str, at: int) -> int:
        """Detect whether objects stand instead of name and arguments."""
        start = skip_whitespace(text, at)
        if start == len(text):
            return self._reject_block(at) if self._final else at
        self._state = self._scan_call_head
        return self._enter_json_objects(start) if text[start] in "[{" else start

    def _enter_json_objects(self, at: int) -> int:
        self._json_calls.begin_block()
        self._state = self._scan_json_objects
        return at

    def _scan_json_objects(self, text: str, at: int) -> int:
        return self._delegate_to_reader(self._json_calls, text, at)

    def _scan_call_head(self, text: str, at: int) -> int:
        """The name with what stands around it."""
        start = skip_whitespace(text, at)
        place, mark = find_first_mark(text, self._head_ends, start)
        if place < 0 and len(text) - start < MAX_HEAD_CHARS and not self._final:
            return at
        head = text[start : max(place, 0)].strip()
        match = self._head.fullmatch(head) if place >= 0 else None
        name = (
            ""
            if match is None
            else self._clean_function_name(self._unescape_attribute(match["name"]))
        )
        counts = self._syntax.counter_alone and head.isdecimal()
        if match is None or place - start > MAX_HEAD_CHARS or not (name in self._tools or counts):
            return self._reject_block(at)
        groups = match.groupdict()
        self._name, self._begun, self._is_begun = "" if counts else name, "", False
        self._id = head if self._syntax.id_from_head else groups.get("id")
        if mark == self._syntax.empty_end:
            return self._emit_empty_call(place + len(mark))
        if (
            self._may_omit_empty_braces
            and mark in self._close
            and self._tool_requires_arguments(name)
        ):
            return self._reject_block(at)
        self._state = self._scan_mark_after_name
        return place

    def _clean_function_name(self, name: str) -> str:
        """Return a name as written, without what a format's models write behind it."""
        return name

    def _unescape_attribute(self, text: str) -> str:
        """Return a name or a key as its tool declares it."""
        return text

    def _emit_empty_call(self, at: int) -> int:
        """A call without arguments ends at a position."""
        self._report_call_begun()
        self._output.add_arguments("{}")
        self._state = self._scan_after_call
        return at

    def _scan_mark_after_name(self, text: str, at: int) -> int:
        mark = self._syntax.string_mark  # a model may omit it
        self._arguments = (
            GemmaToJsonConverter(mark, self._syntax.call[1], self._declared_string_predicate())
            if mark
            else StreamingJsonNormalizer()
        )
        return self._match_marks_then(text, at, self._name_end, self._scan_arguments)

    def _declared_string_predicate(self) -> StringPathPredicate:
        """Which values of the call's arguments are declared as strings."""
        return partial(self._schemas.is_declared_string, self._name)

    def _scan_arguments(self, text: str, at: int) -> int:
        place = skip_whitespace(text, at)
        if place == len(text):
            return self._reject_block(at) if self._final else at
        if text[place] == "{":
            if self._name:
                self._report_call_begun()
            self._state = self._scan_value
            return place
        count, end = self._match_parts(text, at, self._close)
        if end is None:
            return at
        if not count or not self._name:
            return self._reject_block(at)
        return self._emit_empty_call(end)

    def _scan_value(self, text: str, at: int) -> int:
        value = self._arguments
        # a word without marks may go on behind a limit
        at = value.feed(text, at, self._final and not (self.cut and self._syntax.string_mark))
        if self._is_begun:
            return self._emit_value_so_far(value, at, self._scan_closing_marks)
        self._begun += value.drain_json()
        if value.failed:
            return self._reject_block(at)
        if not value.done:
            return at
        self._name = self._infer_tool_from_arguments(self._begun)
        if not self._name:
            return self._reject_block(at)
        self._report_call_begun()
        self._output.add_arguments(self._begun)
        return self._emit_value_so_far(value, at, self._scan_closing_marks)

    def _report_call_begun(self) -> None:
        self._emit_call_begin(self._name, self._id)
        self._drop_pending_as_call()
        self._is_begun = True

    def _infer_tool_from_arguments(self, arguments: str) -> str:
        """The one tool that takes these arguments; "" if it is none or not certain."""
        keys = frozenset(key for key, _ in split_json_object(arguments) or ())
        names = [
            name for name in self._tools if self._schemas.can_call_with_argument_names(name, keys)
        ]
        return names[0] if len(names) == 1 else ""

    def _end_broken_call(self, mark: str) -> None:
        """Behind the end of a call others may come, or the end of the section."""
        if mark == self._call_end and mark != self._section_end:
            self._state = self._scan_after_call
        else:
            self.closed = True

    def _scan_closing_marks(self, text: str, at: int) -> int:
        self._drop_pending_as_call()
        return self._match_marks_then(text, at, self._close, self._scan_after_call)

    def _scan_after_call(self, text: str, at: int) -> int:
        """After a call: another one, the end of the section, or content."""
        if not self._section_close and not self._has_section:
            return self._mark_block_closed(at)
        place = skip_whitespace(text, at)
        separator = self._syntax.separator.strip()
        separated = bool(separator) and text.startswith(separator, place)
        if separated:
            place = skip_whitespace(text, place + len(separator))
        if place == len(text) and not (self._final and separated):
            return self._mark_block_closed(at) if self._final else at
        rest = text[place:]
        if separator.startswith(rest) or (separated and self._open[0].startswith(rest)):
            if not self._final:
                return at
            if self.cut:  # inside the marks before another call
                self._drop_consumed_text()
                return self._mark_block_closed(len(text))
        for part in (*self._open[:1], *self._syntax.openers):
            if rest.startswith(part):
                self._drop_consumed_text()
                self._state = self._scan_opening_marks
                return place
            if part.startswith(rest) and not self._final:
                return at
        return self._match_block_end(text, at, self._section_close)
