"""Calls in Python's syntax: [name(key=value, …), …] with literal values, which are not run."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelmill.text.answer_pieces import PieceCollector
from modelmill.text.chat_syntax import CallSyntax
from modelmill.text.json_call_reader import JsonCallReader
from modelmill.text.python_to_json import PythonToJsonConverter
from modelmill.text.tool_call_reader import (
    MAX_HEAD_CHARS,
    MAX_KEY_CHARS,
    ToolCallReader,
    ToolSchemas,
    find_first_mark,
    longest_suffix_overlap_length,
    skip_whitespace,
    split_mark_parts,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_KEY = re.compile(r"[^\W\d]\w*")
_CODE = re.compile(r"[^\\\"'()\[\]{}]+|\\.|[\"'()\[\]{}]", re.DOTALL)
"""What the end of a call in Python's syntax is found by: quotes, brackets and what is between."""


MAX_SEARCHED_CHARS = 4096
"""Characters of an undeclared call that are read at a time."""


class PythonicCallReader(ToolCallReader):
    """Reads a list of calls; the values are passed on as they come."""

    def __init__(self, syntax: CallSyntax, tools: ToolSchemas, output: PieceCollector) -> None:
        super().__init__(syntax, tools, output)
        # a list inside content is known by the name of a tool
        self.openers = (*self.openers, *(f"[{name}(" for name in tools))
        json_syntax = CallSyntax("json", call=("", syntax.optional[1]), bare=True)
        self._json = JsonCallReader(json_syntax, tools, output)

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        self._name = ""
        self._started = False
        self._value = PythonToJsonConverter(self._syntax.optional[1])
        self._has_mark = False
        self._read, self._list = "", ""
        self._in_brackets = "[" in self._syntax.section[0]
        return self._scan_opening_marks

    def feed(self, text: str, at: int, final: bool = False) -> int:
        """See ``ToolCallReader.feed``; keeps the text of the list, which the model may repeat."""
        self._text_start = at
        end = super().feed(text, at, final)
        if self._syntax.repeats:
            self._read += text[at:end]
        return end

    def _scan_opening_marks(self, text: str, at: int) -> int:
        count, place = self._match_parts(text, at, split_mark_parts(self._syntax.optional[0]))
        if place is None:
            return at
        self._has_mark = bool(count)
        if count and not self._in_brackets:
            self._state = self._scan_function_name
            return place
        start = skip_whitespace(text, place)
        if start == len(text):
            return self._reject_block(at) if self._final else at
        if count and (is_json := _starts_json_objects(text, start)) is not False:
            if is_json is None and not self._final:
                return at
            if is_json:
                self._json.begin_block()
                self._state = self._scan_json_objects
                return start
        if text[start] == "[":
            self._state = self._scan_function_name
            return start + 1
        return self._reject_block(at)

    def _scan_json_objects(self, text: str, at: int) -> int:
        """JSON objects between the marks, which a prompt may ask for."""
        return self._delegate_to_reader(self._json, text, at)

    def _scan_function_name(self, text: str, at: int) -> int:
        start = skip_whitespace(text, at)
        match = _NAME.match(text, start, start + MAX_HEAD_CHARS)
        end = skip_whitespace(text, match.end()) if match else start
        if end == len(text) and not self._final:
            return at
        if self._has_mark and text[start : start + 1] == "]" and not self._undeclared:
            self._drop_pending_as_call()  # an empty list
            return self._consume_list_end(text, at)
        if match is None or text[end : end + 1] != "(":
            return self._consume_list_end(text, at) if self.num_calls else self._reject_block(at)
        if match[0] not in self._tools:
            self._brackets, self._quote = 0, ""
            self._call_text = ""
            self._state = self._scan_undeclared_call
            return start
        self._name, self._started = match[0], False
        self._state = self._scan_keyword
        return end + 1

    def _scan_undeclared_call(self, text: str, at: int) -> int:
        """A call of an undeclared function, up to its last bracket; others may be declared."""
        start = at
        # at a mark of calls the text is read again, so that none is read to the end for each mark
        marks = (*self.openers, *filter(None, self._syntax.optional[1:]))
        # a piece at a time: a list of a thousand calls is not searched to its end for each
        piece = text[at : at + MAX_SEARCHED_CHARS]
        is_last = self._final and at + len(piece) == len(text)
        stop, mark = find_first_mark(piece, marks, 0)
        if not mark:
            stop = len(piece) - (0 if is_last else longest_suffix_overlap_length(piece, marks))
        stop += at
        while match := _CODE.match(text, at, stop):
            at, part = match.end(), match[0]
            if self._quote:
                self._quote = "" if part == self._quote else self._quote
            elif part in ("'", '"'):
                self._quote = part
            elif part in tuple("([{"):
                self._brackets += 1
            elif part in tuple(")]}"):
                self._brackets -= 1
                if not self._brackets:
                    self._add_undeclared_call(self._call_text + text[start:at])
                    self._state = self._scan_after_call
                    return at
        self._call_text += text[start:at]
        return self._reject_block(at) if mark else at

    def _scan_keyword(self, text: str, at: int) -> int:
        """A keyword, or the end of the call."""
        start = skip_whitespace(text, at)
        if start < len(text) and text[start] == ")":
            self._emit_call_arguments("" if self._started else "{")
            self._output.add_arguments("}")
            self._state = self._scan_after_call
            return start + 1
        match = _KEY.match(text, start, start + MAX_KEY_CHARS)
        end = skip_whitespace(text, match.end()) if match else start
        if end == len(text) and not self._final:
            return at
        if match is None or text[end : end + 1] != "=":
            return (
                self._complete_open_call(end)
                if self._started and end == len(text)
                else self._abandon_call(at)
            )
        self._emit_call_arguments(f'{", " if self._started else "{"}"{match[0]}": ')
        self._started = True
        name, key = self._name, match[0]
        self._value = PythonToJsonConverter(
            self._syntax.optional[1],
            is_string=lambda path: self._schemas.is_declared_string(name, (key, *path)),
        )
        self._state = self._scan_value
        return end + 1

    def _emit_call_arguments(self, arguments: str) -> None:
        if not self._started:
            self._emit_call_begin(self._name)
        self._output.add_arguments(arguments)
        self._drop_pending_as_call()

    def _scan_value(self, text: str, at: int) -> int:
        at = self._value.feed(text, at, self._final and not self.cut)
        return self._emit_value_so_far(self._value, at, self._scan_comma)

    def _scan_comma(self, text: str, at: int) -> int:
        start = skip_whitespace(text, at)
        if start == len(text):
            return self._complete_open_call(at)
        self._drop_consumed_text()
        if text[start] == ",":
            self._state = self._scan_keyword
            return start + 1
        self._state = self._scan_keyword
        if text[start] != ")":
            self._end_broken_call_and_skip_rest()
        return start

    def _complete_open_call(self, at: int) -> int:
        """Complete a call that the answer leaves open."""
        if self._final and not self.cut:
            self._output.add_arguments("}")
            self._state = self._scan_after_call
        return at

    def _scan_after_call(self, text: str, at: int) -> int:
        """After a call: another one, or the end of the list."""
        if self.num_calls:
            self._drop_pending_as_call()
        start = skip_whitespace(text, at)
        if start == len(text):
            return self._mark_block_closed(at) if self._final and self.num_calls else at
        if text[start] == ",":
            self._state = self._scan_function_name
            return start + 1
        if not self._in_brackets and _NAME.match(text, start):
            self._state = self._scan_function_name
            return start
        if not self.num_calls:
            return self._reject_block(at)
        self._state = self._scan_closing_marks
        return start + (text[start] == "]")

    def _consume_list_end(self, text: str, at: int) -> int:
        """A comma before the end of the list."""
        self._drop_consumed_text()
        self._state = self._scan_closing_marks
        start = skip_whitespace(text, at)
        return start + (text[start : start + 1] == "]")

    def _scan_closing_marks(self, text: str, at: int) -> int:
        opening, closing = map(split_mark_parts, self._syntax.optional)
        if not self._syntax.repeats:
            return self._match_block_end(text, at, closing)
        if not self._list:
            read = (self._read + text[self._text_start : at]).strip()
            self._list = read.removeprefix(opening[0]).strip()
        count, place = self._match_parts(text, at, closing)
        if place is None:
            return at
        self._drop_consumed_text()
        if not count:
            return self._mark_block_closed(place)
        self._state = self._skip_repeated_list
        return place

    def _skip_repeated_list(self, text: str, at: int) -> int:
        """The same list again, directly behind its end: no call and no content."""
        place = skip_whitespace(text, at)
        rest = text[place : place + len(self._list)]
        if rest == self._list:
            self._drop_consumed_text()
            self._state = self._scan_closing_marks
            return place + len(rest)
        if not self._list.startswith(rest):
            return self._mark_block_closed(at)
        if not self._final:
            return at
        self._drop_consumed_text()  # the answer ends inside the repeat
        return self._mark_block_closed(len(text))

    def _abandon_call(self, at: int) -> int:
        if not self._started:
            return self._reject_block(at)
        self._end_broken_call_and_skip_rest()
        return at


def _starts_json_objects(text: str, at: int) -> bool | None:
    """Whether JSON objects begin at a position; None if more text is needed."""
    if text[at] == "{":
        return True
    if text[at] != "[":
        return False
    place = skip_whitespace(text, at + 1)
    return None if place == len(text) else text[place] == "{"
