"""Calls that write each argument between marks of its own, strings without quotes."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelmill.text.drifted_mark import DriftedMark
from modelmill.text.json_normalizer import StreamingJsonNormalizer, escape_json_text
from modelmill.text.named_call_reader import NamedCallReader
from modelmill.text.parameter_types import (
    ParameterType,
    argument_text_to_json,
)
from modelmill.text.tool_call_reader import (
    MAX_HEAD_CHARS,
    MAX_KEY_CHARS,
    find_first_mark,
    longest_suffix_overlap_length,
    skip_whitespace,
    split_mark_parts,
)

ESCAPED_NEWLINE = "\\n"
"""A backslash and an n, which GLM sometimes writes for the line break between two marks."""
STRING_TYPE_ATTRIBUTE_VALUES = ("string", "any")
"""Names of types whose text is the value, where the tool declares none."""
ARGUMENTS_WRAPPER_KEYS = ("arguments", "input", "parameters", "properties")
"""Names under which models write all arguments as one object, though the tool has no such one."""


class ParameterCallReader(NamedCallReader):
    """Reads calls that write each argument between marks of its own."""

    def _reset_to_first_state(self) -> Callable[[str, int], int]:
        parameter = self._syntax.parameter
        assert parameter is not None, "this style has marks of an argument"
        self._parameter = parameter
        self._param_open = split_mark_parts(parameter.open)
        self._key_end = split_mark_parts(parameter.key_end)
        # line breaks around a value belong to the marks
        self._value_start = parameter.key_end[len(parameter.key_end.rstrip()) :]
        self._value_end = parameter.close[: len(parameter.close) - len(parameter.close.lstrip())]
        whole = self._syntax.whole_marks
        self._value_close = (
            parameter.close.strip() if whole else split_mark_parts(parameter.close)[0]
        )
        self._whole_open = split_mark_parts(parameter.whole[0])
        self._object_close: tuple[str, ...] = ()
        self._num_arguments = 0
        self._type: ParameterType = ParameterType(False, frozenset())
        self._value_marks: tuple[str, ...] = ()
        self._drifted_close: DriftedMark | None = None
        self._prefix = ""
        self._json, self._json_size = StreamingJsonNormalizer(), 0
        self._searched = 0  # characters of a value that have no closing mark
        self._has_brace = False
        self._text_before = ""
        return super()._reset_to_first_state()

    def _unescape_attribute(self, text: str) -> str:
        if not self._parameter.escaped:
            return text
        return text.replace("&quot;", '"').replace("&amp;", "&")

    def _clean_function_name(self, name: str) -> str:
        """The name without an escaped line break, unless a tool is called so."""
        return name if name in self._tools else name.removesuffix(ESCAPED_NEWLINE)

    def _match_parts(self, text: str, at: int, parts: tuple[str, ...]) -> tuple[int, int | None]:
        """As ``ToolCallReader``'s; an escaped line break may be before a part, too."""
        count, place = super()._match_parts(text, at, parts)
        if place is None or count == len(parts):
            return count, place
        start = skip_whitespace(text, place)
        rest = text[start : start + len(ESCAPED_NEWLINE)]
        if rest == ESCAPED_NEWLINE:
            more, end = super()._match_parts(text, start + len(ESCAPED_NEWLINE), parts[count:])
            if end is None or more:
                return count + more, end
        elif rest and not self._final and ESCAPED_NEWLINE.startswith(rest):
            return count, None
        return count, place

    def _argument_start_marks(self) -> tuple[str, ...]:
        return () if self._name_end else ("<",)

    def _scan_mark_after_name(self, text: str, at: int) -> int:
        _, place = self._match_parts(text, at, self._name_end)
        if place is None:
            return at
        self._num_arguments, self._object_close = 0, ()
        self._text_before = ""
        self._state = self._scan_parameter
        return place

    def _emit_call_begin_once(self) -> None:
        """Report the call, unless it is: it has an argument, or its end."""
        if not self._is_begun:
            self._is_begun = True
            self._output.add_text(self._text_before)
            self._emit_call_begin(self._name, self._id)
            self._output.add_arguments("{")
            self._drop_pending_as_call()

    def _drop_consumed_text(self) -> None:
        """What a call has is no text, once it is reported."""
        if self._is_begun:
            super()._drop_consumed_text()

    def _reject_or_break_call(self, at: int) -> int:
        """A call is broken between two arguments; it is none if it is not reported."""
        if not self._is_begun:
            return self._reject_block(at)
        if self._final and self.cut:
            self._state = self._skip_broken_call
        else:
            self._end_broken_call_and_skip_rest()
        return at

    def _scan_parameter(self, text: str, at: int) -> int:
        """An argument, or the end of the call."""
        self._drop_consumed_text()
        count, place = self._match_parts(text, at, self._param_open)
        if place is None:
            return at
        if count == len(self._param_open):
            self._state = self._scan_key
            return place
        start = skip_whitespace(text, at)
        if not self._num_arguments and text[start : start + 1] == "{":
            return self._enter_arguments_object(start)
        if not self._num_arguments and self._whole_open:
            count, place = self._match_parts(text, at, self._whole_open)
            if place is None:
                return at
            if count > 1:
                self._object_close = split_mark_parts(self._parameter.whole[1])
                self._state = self._scan_whole_object_start
                return place
        ends = self._close or self._section_close
        count, place = self._match_parts(text, at, ends)
        if place is None:
            return at
        if not count and not (self._final and not text[at:].strip()):
            if skip_whitespace(text, at) == len(text):
                return at
            if self._is_begun:
                return self._reject_or_break_call(at)
            return self._scan_text_before_arguments(text, at)
        if not count and not self._is_begun:
            return self._reject_block(at)  # the answer ends behind the name
        if count or not self.cut:
            self._emit_call_begin_once()
            self._output.add_arguments("}")
        self._state = self._scan_after_call
        return place

    def _scan_text_before_arguments(self, text: str, at: int) -> int:
        """Text between the name and the first argument, which is content."""
        marks = (self._param_open[0], *self._ends, *self._open[:1], *self.openers)
        place, mark = find_first_mark(text, marks, at)
        if not at < (place if place >= 0 else len(text)) < at + MAX_HEAD_CHARS or (
            mark not in ("", self._param_open[0])
        ):
            return self._reject_block(at)
        if not mark:
            return self._reject_block(at) if self._final else at
        self._text_before = f"{text[at:place].strip()}\n"
        return place

    def _scan_whole_object_start(self, text: str, at: int) -> int:
        """Behind the mark before all arguments as one object."""
        self._drop_consumed_text()
        start = skip_whitespace(text, at)
        if start == len(text):
            return at
        if text[start] == "{":
            return self._enter_arguments_object(start)
        self._emit_call_begin_once()  # its marks say that it is a call
        self._end_broken_call_and_skip_rest()
        return at

    def _enter_arguments_object(self, at: int) -> int:
        self._json = StreamingJsonNormalizer(is_string=self._declared_string_predicate())
        self._begun, self._has_brace = "", True
        self._num_arguments = 0
        self._state = self._scan_arguments_object
        return at

    def _scan_arguments_object(self, text: str, at: int) -> int:
        """All arguments as one object, which some models write instead."""
        self._drop_consumed_text()
        at = self._json.feed(text, at, self._final)
        self._begun += self._json.drain_json()
        ended = self._final and not self.cut and not self._json.failed
        if self._has_brace and (ended or self._begun[1:].strip()):
            self._emit_call_begin_once()  # with a brace
            self._begun, self._has_brace = self._begun[1:], False
        if not self._has_brace:
            # its own brace waits, since more arguments may follow
            text = self._begun[:-1] if self._json.done else self._begun
            if text.strip():
                self._num_arguments = 1  # or more: what follows needs a comma
            self._output.add_arguments(text)
            self._begun = ""
        if self._json.failed:
            if not self._is_begun:
                return self._reject_block(at)
            self._end_broken_call_and_skip_rest()
        elif self._json.done:
            self._state = self._scan_arguments_object_close
        return at

    def _scan_arguments_object_close(self, text: str, at: int) -> int:
        self._drop_consumed_text()
        return self._match_marks_then(text, at, self._object_close, self._scan_parameter)

    def _scan_key(self, text: str, at: int) -> int:
        self._drop_consumed_text()
        mark = self._key_end[0]
        place = text.find(mark, at, at + MAX_KEY_CHARS)
        if place < 0:
            return (
                self._reject_or_break_call(at)
                if self._final or len(text) - at >= MAX_KEY_CHARS
                else at
            )
        written_type, behind_type = self._parse_type_after_key(text, place + len(mark))
        if behind_type is None:
            return at
        if behind_type < 0:
            return self._reject_or_break_call(at)
        if written_type:
            count, end = self._match_parts(text, behind_type, self._key_end[1:])
            count += 1
        else:
            count, end = self._match_parts(text, place, self._key_end)
        if end is None:
            return at
        if count < len(self._key_end) and self._parameter.whole_key_end:
            return self._reject_or_break_call(at)
        if count < len(self._key_end) and (empty := self._is_value_missing(text, end)) is not False:
            if empty:
                self._state = self._scan_parameter
            return end if empty else at
        key, attribute = text[at:place], None
        if self._parameter.type_open:
            before, behind = split_mark_parts(self._parameter.type_open)
            key, _, written_type = key.partition(before)
            if not written_type.strip():
                return self._reject_or_break_call(at)
            written_type = written_type.strip().removeprefix(behind).strip()
        elif self._parameter.type_attribute:
            key, attribute = _split_key_and_is_string(key.rstrip())
        if self._parameter.type_open or written_type:
            attribute = written_type in STRING_TYPE_ATTRIBUTE_VALUES
        key = self._clean_key(self._unescape_attribute(key))
        self._type = self._schemas.parameter_type(
            self._name, key, self._parameter.undeclared, attribute
        )
        self._emit_call_begin_once()
        self._prefix = f'{", " if self._num_arguments else ""}"{escape_json_text(key)}": '
        self._num_arguments += 1
        wraps = self._num_arguments == 1 and self._is_arguments_wrapper_key(key)
        self._state = self._scan_wrapped_arguments if wraps else self._scan_value_start
        return end

    def _parse_type_after_key(self, text: str, at: int) -> tuple[str, int | None]:
        """The name of a type between its marks, and the position behind it.

        Returns:
            "" and the same position if there is none; the position is None if more text is
            needed, and negative if the mark behind the name is missing.
        """
        opening, closing = self._parameter.type_marks
        start = skip_whitespace(text, at)
        head = text[start : start + len(opening)]
        if not opening or not opening.startswith(head) or (self._final and head != opening):
            return "", at
        stop = text.find(closing, start, start + MAX_KEY_CHARS)
        if stop < 0:
            return "", -1 if self._final or len(text) - start >= MAX_KEY_CHARS else None
        return text[start + len(opening) : stop].strip() or "any", stop + len(closing)

    def _is_value_missing(self, text: str, at: int) -> bool | None:
        """Whether another argument, or the call's or the answer's end follows a key.

        None if more is needed.
        """
        rest = text[skip_whitespace(text, at) :]
        marks = (self._param_open[0], *self._close[:1])
        if rest.startswith(marks) or (self._final and not rest):
            return True
        begun = not self._final and any(mark.startswith(rest) for mark in marks)
        return None if begun else False

    def _declared_arguments(self) -> frozenset[str] | None:
        """Names of the arguments that the tool declares; None if it does not say."""
        return self._schemas.declared_arguments(self._name)

    def _clean_key(self, key: str) -> str:
        """The key without blanks around it, unless the tool declares it with them."""
        return key if key in (self._declared_arguments() or ()) else key.strip()

    def _is_arguments_wrapper_key(self, key: str) -> bool:
        """Whether a key is none of the tool, but one under which models write all arguments."""
        declared = self._declared_arguments()
        return declared is not None and key in ARGUMENTS_WRAPPER_KEYS and key not in declared

    def _scan_wrapped_arguments(self, text: str, at: int) -> int:
        """All arguments as one object under a name of its own."""
        self._drop_consumed_text()
        start = skip_whitespace(text, at)
        if start == len(text) and (self.cut or not self._final):
            return at
        if text[start : start + 1] != "{":
            self._state = self._scan_value_start
            return at
        self._object_close = split_mark_parts(self._parameter.close)
        return self._enter_arguments_object(start)

    def _scan_value_start(self, text: str, at: int) -> int:
        """Skip the line break before a value."""
        self._drop_consumed_text()
        blank = self._value_start
        rest = text[at : at + len(blank)]
        if len(rest) < len(blank) and blank.startswith(rest) and not self._final:
            return at
        if self._type.is_string:
            self._output.add_arguments(self._prefix + '"')
        self._json, self._json_size, self._searched = StreamingJsonNormalizer(), 0, 0
        self._set_value_marks()
        self._state = (
            self._detect_verbatim_mark if self._parameter.verbatim[0] else self._scan_value_text
        )
        return at + len(blank) if rest == blank else at

    def _detect_verbatim_mark(self, text: str, at: int) -> int:
        """Detect the mark around the text of a value."""
        mark = self._parameter.verbatim[0]
        start = skip_whitespace(text, at)
        if mark.startswith(text[start : start + len(mark)]):
            if text.startswith(mark, start):
                self._drop_consumed_text()
                self._state = self._scan_verbatim_text
                return start + len(mark)
            if not self._final:
                return at
        self._state = self._scan_value_text
        return at

    def _scan_verbatim_text(self, text: str, at: int) -> int:
        self._drop_consumed_text()
        mark = self._parameter.verbatim[1]
        place = text.find(mark, at + self._searched)
        if place < 0:
            if not self._type.is_string and not self._final:
                return self._wait_for_closing_mark(text, at, (mark,))
            self._searched = 0
            stop = len(text) - longest_suffix_overlap_length(text[at:], (mark,))
            return self._emit_unfinished_value(text, at, stop)
        self._emit_complete_value(text[at:place])
        return place + len(mark)

    def _emit_unfinished_value(self, text: str, at: int, stop: int) -> int:
        """Pass a value on that does not end in the text, up to a position."""
        if self._final and not self.cut:
            self._emit_complete_value(text[at:stop])
        elif self._type.is_string:
            self._output.add_arguments(escape_json_text(text[at:stop]))
        elif self._final:
            self._state = self._skip_broken_call
        return len(text) if self._final else stop

    def _emit_complete_value(self, value: str) -> None:
        if self._type.is_string:
            self._output.add_arguments(escape_json_text(value) + '"')
        else:
            self._output.add_arguments(self._prefix + argument_text_to_json(value, self._type))
        self._state = self._scan_value_close

    def _scan_value_text(self, text: str, at: int) -> int:
        """A value up to its closing mark; a string is passed on as it comes."""
        self._drop_consumed_text()
        place = self._find_json_end(text, at) if not self._type.is_string else -1
        if place is None:
            if not self._final:
                return at
            self._state = self._skip_broken_call
            return len(text)
        end = place
        if place < 0:
            place, end = self._find_value_end(text, at)
        if place < 0:
            if not self._type.is_string and not self._final:
                return self._wait_for_closing_mark(text, at, self._value_marks)
            self._searched = 0
            stop = len(text) - longest_suffix_overlap_length(
                text[at:], (self._value_end + self._value_close, *self._value_marks)
            )
            if self._drifted_close is not None:
                stop = min(stop, self._drifted_close.find_begun(text, at))
            return self._emit_unfinished_value(text, at, stop)
        value = text[at:place]
        closes = end != place or text.startswith(self._value_close, place)
        # what begins the next argument, or ends the call, has its own line break in front
        if closes and self._value_end and value.endswith(self._value_end):
            value = value[: -len(self._value_end)]
        self._emit_complete_value(value)
        return end

    def _find_value_end(self, text: str, at: int) -> tuple[int, int]:
        """Where a value ends, and where what follows it begins; negative if it does not."""
        start = at + self._searched
        place, _ = find_first_mark(text, self._value_marks, start)
        if self._drifted_close is None:
            return place, place
        drifted, end = self._drifted_close.find(text, start, place if place >= 0 else len(text))
        return (drifted, end) if drifted >= 0 else (place, place)

    def _wait_for_closing_mark(self, text: str, at: int, marks: tuple[str, ...]) -> int:
        """Keep a value that has none of its closing marks yet; nothing is searched twice."""
        longest = max(map(len, marks))
        if self._drifted_close is not None:
            longest = max(longest, self._drifted_close.max_chars)
        self._searched = max(0, len(text) - at - longest)
        return at

    def _set_value_marks(self) -> None:
        """Set the marks that end a value of the present type, and its closing mark's drift.

        A model that leaves the closing mark out writes what follows.
        """
        self._value_marks, self._drifted_close = (self._value_close,), None
        if self._value_end:
            end = self._syntax.call[1] if self._type.is_string else self._close[0]
            following = (self._param_open[0], end)
            self._value_marks += tuple(self._value_end + mark for mark in following)
            self._drifted_close = DriftedMark(self._value_close, following)

    def _find_json_end(self, text: str, at: int) -> int | None:
        """Where a JSON value ends, which may have the closing mark in its strings.

        Returns:
            The position; -1 if the text is no JSON value; None if more text is needed, also
            where a limit cut it off.
        """
        stream = self._json
        ends = self._final and not self.cut
        self._json_size = stream.feed(text, at + self._json_size, self._final) - at
        stream.drain_json()
        if not (stream.done or stream.failed or ends):
            return None
        end = skip_whitespace(text, at + self._json_size)
        if not stream.done:
            return -1
        marks = self._marks_behind_json(text[at:end])
        if text.startswith(marks, end):
            return end
        begun = not ends and any(mark.startswith(text[end:]) for mark in marks)
        return None if begun else -1

    def _marks_behind_json(self, value: str) -> tuple[str, ...]:
        """The closing mark of a JSON value, and what follows it, where a model leaves it out."""
        is_text = self._type.takes_string and value.lstrip()[:1] not in ("{", "[")
        if is_text or self._syntax.whole_marks:
            return (self._value_close,)
        return (self._value_close, self._param_open[0], *self._close[:1])

    def _scan_value_close(self, text: str, at: int) -> int:
        self._drop_consumed_text()
        return self._match_marks_then(
            text, at, split_mark_parts(self._parameter.close), self._scan_parameter
        )


def _split_key_and_is_string(key: str) -> tuple[str, bool | None]:
    """Split name" string="true, or name" type="string": the name, and whether it is a string."""
    match = re.fullmatch(r'([^"]*)"\s*(?:string="(true|false)|type="([a-z]+)"?)', key)
    return (match[1], match[2] == "true" or match[3] == "string") if match else (key, None)
