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
_BRACKET = re.compile(r"[()\[\]{}]")
_QUOTES = ("'", '"')
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
        marks = (*self.openers, *filter(None, syntax.optional[1:]))
        self._control_tokens = tuple(mark for mark in marks if mark.startswith("<|"))
        self._undeclared_stops = (*marks, *_QUOTES)

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        self._name = ""
        self._started = False
        self._value = PythonToJsonConverter(self._syntax.optional[1])
        self._has_mark = False
        self._read, self._list = "", ""
        self._in_brackets = "[" in self._syntax.section[0]
        self._is_code = False  # a call behind the mark, without the bracket of a list
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
        if not count:
            return self._reject_block(at)
        self._state = self._detect_code
        return start

    def _detect_code(self, text: str, at: int) -> int:
        """Detect whether code in Python's syntax stands between the marks: it is content."""
        _, end = _match_word(_NAME, text, at, MAX_HEAD_CHARS)
        if end == len(text) and not self._final:
            return at
        if text[end : end + 1] != "(":
            return self._reject_block(at)
        self._is_code = True
        self._enter_undeclared_call()
        return at

    def _scan_json_objects(self, text: str, at: int) -> int:
        """JSON objects between the marks, which a prompt may ask for."""
        return self._delegate_to_reader(self._json, text, at)

    def _scan_function_name(self, text: str, at: int) -> int:
        start = skip_whitespace(text, at)
        match, end = _match_word(_NAME, text, start, MAX_HEAD_CHARS)
        if end == len(text) and not self._final:
            return at
        if self._has_mark and text[start : start + 1] == "]" and not self._undeclared:
            self._drop_pending_as_call()  # an empty list
            return self._consume_list_end(text, at)
        if match is None or text[end : end + 1] != "(":
            if self.num_calls:
                return self._consume_list_end(text, at)
            return self._end_undeclared_calls(at) if self._undeclared else self._reject_block(at)
        if match[0] not in self._tools:
            self._enter_undeclared_call()
            return at
        self._name, self._started = match[0], False
        self._state = self._scan_keyword
        return end + 1

    def _enter_undeclared_call(self) -> None:
        """A call is text up to its last bracket; behind it may be others of declared functions."""
        self._brackets, self._call_start = 0, len(self._pending)
        self._state = self._scan_undeclared_call

    def _scan_undeclared_call(self, text: str, at: int) -> int:
        """An undeclared call up to its last bracket, or to a string in it."""
        # a piece at a time: a list of a thousand calls is not searched to its end for each
        piece = text[at : at + MAX_SEARCHED_CHARS]
        is_last = self._final and at + len(piece) == len(text)
        # an open call ends at a mark of calls: a stream does not wait for its end
        stops = self._undeclared_stops
        stop, mark = find_first_mark(piece, stops)
        if not mark:
            stop = len(piece) - (0 if is_last else longest_suffix_overlap_length(piece, stops))
        for match in _BRACKET.finditer(piece, 0, stop):
            self._brackets += 1 if match[0] in "([{" else -1
            if not self._brackets:
                return self._complete_undeclared_call(text, at, at + match.end())
        if mark in _QUOTES:
            self._quote, self._state = mark, self._scan_undeclared_string
            return at + stop + 1
        ends = bool(mark) or (is_last and not piece)
        return self._end_undeclared_calls(at + stop) if ends else at + stop

    def _scan_undeclared_string(self, text: str, at: int) -> int:
        """A string of an undeclared call, in which only a control token is a mark of calls."""
        ends = (self._quote, "\\", *self._control_tokens)
        place, mark = find_first_mark(text, ends, at)
        if not mark:
            if self._final and at == len(text):
                return self._end_undeclared_calls(at)
            size = 0 if self._final else longest_suffix_overlap_length(text, ends)
            return max(at, len(text) - size)
        if mark in self._control_tokens:
            return self._end_undeclared_calls(place)
        following = skip_whitespace(text, place + 1)
        if following == len(text) and not self._final:
            return place
        if mark == "\\":
            return min(place + 2, len(text))
        # models forget to escape quotes of the same kind inside
        if following == len(text) or text[following] in ",:)]}":
            self._state = self._scan_undeclared_call
        return place + 1

    def _complete_undeclared_call(self, text: str, start: int, at: int) -> int:
        if self._is_code:
            return self._end_undeclared_calls(at)
        call = "".join(self._pending[self._call_start :]) + text[start:at]
        self._add_undeclared_call(call.lstrip())
        self._state = self._scan_after_call
        return at

    def _end_undeclared_calls(self, at: int) -> int:
        """What came up to here is content, and not read again: no call stands in its strings."""
        if self._final and self.cut and (self._has_mark or self.num_calls):
            return self._reject_block(at)
        return self._mark_block_closed(at)

    def _scan_keyword(self, text: str, at: int) -> int:
        """A keyword, or the end of the call."""
        start = skip_whitespace(text, at)
        if start < len(text) and text[start] == ")":
            self._emit_call_arguments("" if self._started else "{")
            self._output.add_arguments("}")
            self._state = self._scan_after_call
            return start + 1
        match, end = _match_word(_KEY, text, start, MAX_KEY_CHARS)
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
            if self._final and self.num_calls:
                return self._mark_block_closed(at)
            return self._end_undeclared_calls(at) if self._final else at
        if text[start] == ",":
            self._state = self._scan_function_name
            return start + 1
        if not self._in_brackets and _NAME.match(text, start):
            self._state = self._scan_function_name
            return start
        if not self.num_calls:
            return self._end_undeclared_calls(at)
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


def _match_word(
    pattern: re.Pattern[str], text: str, at: int, max_chars: int
) -> tuple[re.Match[str] | None, int]:
    """The word at a position, and where what follows it begins; the position if there is none."""
    match = pattern.match(text, at, at + max_chars)
    return match, skip_whitespace(text, match.end()) if match else at
