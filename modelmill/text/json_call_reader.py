"""Calls as JSON objects {"name", "arguments"}, alone, in a list, or one after the other."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable

from modelmill.text.json_normalizer import StreamingJsonNormalizer, normalize_json
from modelmill.text.parameter_types import coerce_arguments_to_schema
from modelmill.text.tokenizer_base import replace_surrogates
from modelmill.text.tool_call_reader import (
    MAX_HEAD_CHARS,
    ToolCallReader,
    find_first_mark,
    longest_suffix_overlap_length,
    skip_whitespace,
    split_mark_parts,
)

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_CODE_CHARS = 4096


class JsonCallReader(ToolCallReader):
    """Reads call objects; keys may come in any order, and further ones are ignored."""

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        code = self._syntax.code_mark
        # a list's brackets are optional: what is between objects is read by _between
        self._opening = tuple(
            part[:-1] if part.endswith("[") and len(part) > 1 else part
            for part in (
                *self._section,
                *split_mark_parts(code),
                *self._open,
                *self._syntax.openers,
            )
            if part != "["
        )
        closing = (part.removeprefix("]") for part in (*self._close, *self._section_close))
        self._closing = (*filter(None, closing), *self._syntax.closers)
        self._has_lines = self._syntax.separator == "\n" and bool(self._section_close)
        self._value: StreamingJsonNormalizer | None = None
        self._in_list = self._has_mark = self._has_list_ended = False
        self._expects_item = False  # behind a list's bracket or a comma
        self._reset_object_state()
        return self._scan_opening_marks

    def _reset_object_state(self) -> None:
        self._emitted = False  # this object has been reported as a call
        self._is_text = False  # it is none, but the next one of the list may be
        self._object_start = len(self._pending)  # pieces of text before it
        self._name: str | None = None
        self._arguments: str | None = None  # complete before the name was known
        self._key: str | None = None
        self._passing = False
        self._begun = ""  # arguments that are passed on once they have begun as an object does
        self._key_chars = 0

    def _scan_opening_marks(self, text: str, at: int) -> int:
        count, place = self._match_parts(text, at, self._opening)
        if place is None:
            return at
        code = self._syntax.code_mark
        if (
            code
            and text.startswith(code, at)
            and not text[at + len(code) :].strip()
            and not self._final
        ):
            return at
        self._state = self._scan_between_objects
        self._has_mark = bool(count)
        if not count:
            # without a mark, a call stands at the begin of the content or is an inline one
            bare = self._syntax.bare or text.startswith(("{", *self._syntax.inline), at)
            return at if bare else self._reject_block(at)
        if code and text[at:place].strip() == code and text[place:].lstrip()[:1] not in "{[":
            self._state = self._scan_python_code
        return place

    def _scan_between_objects(self, text: str, at: int) -> int:
        """Between objects."""
        start = at
        while at < len(text) and (
            text[at].isspace()
            or (text[at] == "[" and not self.num_calls and not self._in_list)
            or (self.num_calls and text[at] in "],;}")
            or (self._undeclared and text[at] == ",")
        ):
            self._in_list = self._in_list or text[at] == "["
            if not text[at].isspace():
                self._expects_item = text[at] in "[,"
                self._has_list_ended = self._has_list_ended or text[at] == "]"
            at += 1
        if at > start:
            if self.num_calls:
                self._drop_pending_as_call()
            return at
        if at == len(text):
            return self._mark_block_closed(at) if self._final and self.num_calls else at
        if text[at] == "{":
            # a section with a call in each line is a list, too
            self._in_list = self._in_list or (self._has_lines and not self._open)
            self._reset_object_state()
            self._state = self._scan_key
            return at + 1
        if self._may_be_list_item(text[at]):
            self._reset_object_state()
            self._value = StreamingJsonNormalizer()
            self._state = self._scan_list_item
            return at
        if not self.num_calls:
            return self._reject_block(at)
        self._state = self._scan_closing_marks
        return self._scan_closing_marks(text, at)

    def _may_be_list_item(self, char: str) -> bool:
        """Whether a character may begin an item of a list that is no object.

        A list without a mark is content as soon as it begins with such an item.
        """
        is_calls = self._has_mark or self.num_calls > 0 or bool(self._undeclared)
        is_open = self._in_list and not self._has_list_ended
        return is_calls and is_open and self._expects_item and char not in "]}<"

    def _scan_list_item(self, text: str, at: int) -> int:
        """An item that is no object, and no call: text, as a call of an undeclared function."""
        value = self._value
        assert value is not None, "a value has begun"
        if not value.done:
            at = value.feed(text, at, self._final)
            return self._abandon_object(at) if value.failed else at
        end = skip_whitespace(text, at)
        if end == len(text):
            return at
        if text[end] not in ",]":
            return self._abandon_object(at)
        self._state = self._scan_between_objects
        self._add_undeclared_call("".join(self._pending[self._object_start :]))
        return at

    def _scan_closing_marks(self, text: str, at: int) -> int:
        return self._match_block_end(text, at, self._closing)

    def _scan_key(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        char = text[at]
        if char.isspace():
            return at + 1
        if char == "}":
            return self._on_object_complete(at)
        if char not in "\"'":
            return self._abandon_object(at)
        self._value, self._key, self._passing = StreamingJsonNormalizer(), None, False
        self._key_chars = 0
        self._state = self._scan_value
        return at

    def _scan_colon(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        if text[at] == ":":
            self._state = self._scan_value_start
            return at + 1
        return at + 1 if text[at].isspace() else self._abandon_object(at)

    def _scan_value_start(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        if text[at].isspace():
            return at + 1
        self._value = StreamingJsonNormalizer()
        self._passing = (
            text[at] == "{"
            and self._key in ARGUMENT_KEYS
            and self._name is not None
            and not self._emitted
            and not self._syntax.declared_types
        )
        self._state = self._scan_value
        return at

    def _scan_value(self, text: str, at: int) -> int:
        value = self._value
        assert value is not None, "a value has begun"
        start = at
        at = value.feed(text, at, self._final)
        if self._passing and (self._emitted or self._try_start_argument_stream(value)):
            return self._emit_value_so_far(value, at, self._scan_after_value)
        if value.failed:
            return self._abandon_object(at)
        self._key_chars += (at - start) if self._key is None else 0
        if self._key_chars > MAX_HEAD_CHARS:
            # no key is that long; the place does not depend on how the text came
            return self._abandon_object(at - (self._key_chars - MAX_HEAD_CHARS))
        if not value.done:
            return at
        return at if self._on_value_complete(value.drain_json()) else self._abandon_object(at)

    def _try_start_argument_stream(self, value: StreamingJsonNormalizer) -> bool:
        """Report the call once its arguments are more than a brace."""
        self._begun += value.drain_json()
        if not self._begun[1:].strip():
            return False
        self._emit_call_with_arguments(self._begun)
        return True

    def _scan_after_value(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        char = text[at]
        if char == ",":
            self._state = self._scan_key
            return at + 1
        if char.isspace():
            return at + 1
        return self._on_object_complete(at) if char == "}" else self._abandon_object(at)

    # -- complete parts

    def _abandon_object(self, at: int) -> int:
        """What follows cannot belong to a call object."""
        if not self._emitted:
            if self.num_calls:
                self._state = (
                    self._skip_non_call_line if self._has_lines else self._scan_closing_marks
                )
                return at
            return self._reject_block(at)
        self._state = self._scan_closing_marks  # a brace is missing
        return at

    def _skip_non_call_line(self, text: str, at: int) -> int:
        """Discard the rest of a line that is no call; the next one may be one."""
        self._drop_pending_as_call()
        ends = ("\n", self._section_close[0])
        place, mark = find_first_mark(text, ends, at)
        if place < 0:
            return (
                len(text)
                if self._final
                else max(at, len(text) - longest_suffix_overlap_length(text, ends))
            )
        self._state = self._scan_between_objects if mark == "\n" else self._scan_closing_marks
        return place

    def _continue_as_text(self) -> bool:
        """Whether an object that is no call may be read on, since others of a list may be calls."""
        self._is_text = self._in_list
        return self._is_text

    def _on_value_complete(self, text: str) -> bool:
        if self._key is None:
            self._key, self._state = replace_surrogates(json.loads(text)), self._scan_colon
            return True
        self._state = self._scan_after_value
        if self._is_text:
            return True
        if self._key == self._syntax.name_key:
            return self._on_name_complete(text)
        if self._key not in ARGUMENT_KEYS or self._emitted or self._arguments is not None:
            return True
        arguments: str | None = text
        if text[:1] == '"':
            arguments = normalize_json(replace_surrogates(json.loads(text)))
        elif text == "null":
            arguments = "{}"
        if arguments is None or arguments[:1] != "{":
            return self._continue_as_text()
        if self._name is None:
            self._arguments = arguments
        else:
            self._emit_call_with_arguments(arguments)
        return True

    def _on_name_complete(self, text: str) -> bool:
        if self._emitted or self._name is not None:
            return True
        name = replace_surrogates(json.loads(text)) if text[:1] == '"' else None
        if name not in self._tools:
            return self._continue_as_text()
        self._name = name
        if self._arguments is not None:
            self._emit_call_with_arguments(self._arguments)
        return True

    def _emit_call_with_arguments(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name"
        self._emitted = True
        self._drop_pending_as_call()
        self._emit_call_begin(self._name)
        if self._syntax.declared_types:
            arguments = coerce_arguments_to_schema(arguments, self._tools[self._name])
        self._output.add_arguments(arguments)

    def _on_object_complete(self, at: int) -> int:
        self._state = self._scan_between_objects
        name = None if self._is_text else self._name
        if not self._emitted:
            if name is None or not self._tool_requires_no_arguments(name):
                if not self._in_list:
                    return self._abandon_object(at)
                self._add_undeclared_call("".join(self._pending[self._object_start :]) + "}")
                return at + 1
            self._emit_call_with_arguments("{}")
        self._drop_pending_as_call()
        return at + 1

    # -- code

    def _scan_python_code(self, text: str, at: int) -> int:
        """Code is complete only at the end of the answer."""
        if not self._final:
            return at
        call = _parse_python_call(text[at:].strip())
        if call is None or call[0] not in self._tools:
            return self._reject_block(at)
        self._drop_pending_as_call()
        self._emit_call_begin(call[0])
        self._output.add_arguments(call[1])
        return self._mark_block_closed(len(text))


def _parse_python_call(code: str) -> tuple[str, str] | None:
    """Parse one call name.call(key=value, …) or name(key=value, …) with literal values.

    The code is not run.

    Returns:
        The name and the arguments as JSON; None for other code.
    """
    if len(code) > MAX_CODE_CHARS:
        return None
    try:
        tree = ast.parse(code, mode="eval").body
        if (
            not isinstance(tree, ast.Call)
            or tree.args
            or not all(word.arg for word in tree.keywords)
        ):
            return None
        function = tree.func
        if isinstance(function, ast.Attribute) and function.attr == "call":
            function = function.value
        values = {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return (function.id, replace_surrogates(arguments)) if isinstance(function, ast.Name) else None
