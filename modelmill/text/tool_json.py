"""Incremental JSON parser of calls {"name", "arguments"}, one character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Protocol

from modelmill.text.tokenizer_base import replace_surrogates

ARGUMENT_KEYS = ("arguments", "parameters")


class CallSink(Protocol):
    """Receives the parsed calls."""

    def begin_call(self, name: str) -> None:
        """Begin a call of the function ``name``."""

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""


class ToolJsonParser:
    """Parses call objects, alone or in a list, and passes calls to a sink.

    Characters that have not become a call are buffered; ``release`` returns them. ``num_calls`` is
    the number of calls so far.
    """

    def __init__(self, names: Collection[str], sink: CallSink) -> None:
        self._names, self._sink = names, sink
        self._pending: list[str] = []
        self._state: Callable[[str], bool] = self._scan_between
        self.num_calls = 0
        self._reset()

    def _reset(self) -> None:
        self._emitted = False  # this object has been reported as a call
        self._name: str | None = None
        self._arguments: str | None = None  # complete before the name was known
        self._key: str | None = None
        self._raw: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = self._passing = False

    @property
    def is_blank(self) -> bool:
        """Whether only whitespace has come."""
        return not self.num_calls and not "".join(self._pending).strip()

    def begin(self, name: str) -> None:
        """Begin a call whose name came before the JSON; the next character opens its arguments."""
        self._reset()
        self._name = name
        self._key = ARGUMENT_KEYS[0]
        self._state = self._scan_value

    def feed(self, char: str) -> bool:
        """Consume a character; returns False, without consuming it, if no call can contain it."""
        if not self._state(char):
            return False
        if not self._emitted and (self._state != self._scan_between or not self.num_calls):
            self._pending.append(char)
        return True

    def release(self) -> str:
        """Return the buffered text and clear the buffer."""
        pending, self._pending = "".join(self._pending), []
        return pending

    # -- states

    def _scan_between(self, char: str) -> bool:
        if char == "{":
            self._reset()
            self._state = self._scan_key
            return True
        return (
            char.isspace()
            or (char == "[" and self.is_blank)
            or (bool(self.num_calls) and char in "],;}")
        )

    def _scan_key(self, char: str) -> bool:
        if char == '"':
            self._raw, self._key = [char], None
            self._state = self._scan_string
            return True
        return char.isspace() or (char == "}" and self._object_done())

    def _scan_string(self, char: str) -> bool:
        self._raw.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            return self._string_done()
        return True

    def _string_done(self) -> bool:
        """Handle a complete string: a key or a value."""
        try:
            text = replace_surrogates(json.loads("".join(self._raw), strict=False))
        except ValueError:
            return False
        if self._key is None:
            self._key, self._state = text, self._scan_colon
            return True
        self._state = self._scan_next
        if self._key == "name":
            return self._name_done(text)
        return self._arguments_done(text)

    def _scan_colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._scan_value
            return True
        return char.isspace()

    def _scan_value(self, char: str) -> bool:
        if char.isspace():
            return True
        self._raw = [char]
        if char == '"':
            self._state = self._scan_string
            return True
        if char in "{[":
            self._depth = 1
            self._quoted = False
            self._escaped = False
            self._state = self._scan_nested
            self._passing = (
                char == "{"
                and self._key in ARGUMENT_KEYS
                and self._name is not None
                and not self._emitted
            )
            if self._passing:
                self._emit_call("{")
            return True
        self._state = self._scan_scalar
        return char.isalnum() or char == "-"

    def _scan_nested(self, char: str) -> bool:
        if char == "<" and not self._quoted:
            return False  # not JSON: a closing mark after an unclosed object
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped, self._quoted = char == "\\", char != '"'
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if self._passing:
            self._sink.add_arguments(char)
        else:
            self._raw.append(char)
        if self._depth:
            return True
        self._state = self._scan_next
        if self._passing:
            return True
        return self._key != "name" and self._arguments_done(
            "".join(self._raw), ok=self._raw[0] == "{"
        )

    def _scan_scalar(self, char: str) -> bool:
        if char.isalnum() or char in "+-.":
            self._raw.append(char)
            return True
        self._state = self._scan_next
        done = self._key != "name" and self._arguments_done("{}", ok="".join(self._raw) == "null")
        return done and self._scan_next(char)

    def _scan_next(self, char: str) -> bool:
        if char == ",":
            self._state = self._scan_key
            return True
        return char.isspace() or (char == "}" and self._object_done())

    # -- complete parts

    def _name_done(self, name: str) -> bool:
        if self._emitted or self._name is not None:
            return True
        if name not in self._names:
            return False
        self._name = name
        if self._arguments is not None:
            self._emit_call(self._arguments)
        return True

    def _arguments_done(self, arguments: str, ok: bool = True) -> bool:
        """Handle a complete value that is not the name; only arguments are used."""
        if self._key not in ARGUMENT_KEYS or self._emitted or self._arguments is not None:
            return True
        if ok and self._name is not None:
            self._emit_call(arguments)
        elif ok:
            self._arguments = arguments
        return ok

    def _emit_call(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name"
        self._emitted, self._pending = True, []
        self.num_calls += 1
        self._sink.begin_call(self._name)
        self._sink.add_arguments(arguments)

    def _object_done(self) -> bool:
        if not self._emitted:
            if self._name is None:
                return False
            self._emit_call("{}")
        self._state, self._emitted = self._scan_between, False
        return True
