"""Objects {"name", "arguments"} in JSON that comes a character at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Protocol

from modelmill.text.tokens import well_formed

ARGUMENTS = ("arguments", "parameters")


class Sink(Protocol):
    """Who is told of calls."""

    def call(self, name: str) -> None:
        """A call begins."""

    def argue(self, text: str) -> None:
        """More of its arguments."""


class Objects:
    """One object after another, alone or in a list. ``feed`` says whether a character belongs to them.

    What has been fed and has not become a call is held, and given back by ``release``. told: how many calls there were.
    """

    def __init__(self, names: Collection[str], sink: Sink) -> None:
        self._names, self._sink = names, sink
        self._held: list[str] = []
        self._state: Callable[[str], bool] = self._between
        self.told = 0
        self._reset()

    def _reset(self) -> None:
        self._live = False  # this object has been told as a call
        self._name: str | None = None
        self._arguments: str | None = None  # complete before the name was known
        self._key: str | None = None
        self._raw: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = self._passing = False

    @property
    def untouched(self) -> bool:
        """Whether nothing but blanks has come."""
        return not self.told and not "".join(self._held).strip()

    def begin(self, name: str) -> None:
        """A call's name stands before its arguments: the next character opens them."""
        self._reset()
        self._name, self._key, self._state = name, ARGUMENTS[0], self._value

    def feed(self, char: str) -> bool:
        """Take a character; False, and it is not taken, where it cannot belong to a call."""
        if not self._state(char):
            return False
        if not self._live and (self._state != self._between or not self.told):
            self._held.append(char)
        return True

    def release(self) -> str:
        """What was held."""
        held, self._held = "".join(self._held), []
        return held

    # -- states

    def _between(self, char: str) -> bool:
        if char == "{":
            self._reset()
            self._state = self._begin_key
            return True
        return char.isspace() or (char == "[" and self.untouched) or (bool(self.told) and char in "],;}")

    def _begin_key(self, char: str) -> bool:
        if char == '"':
            self._raw, self._key = [char], None
            self._state = self._string
            return True
        return char.isspace() or (char == "}" and self._end())

    def _string(self, char: str) -> bool:
        self._raw.append(char)
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            return self._text()
        return True

    def _text(self) -> bool:
        """A string is complete: a key, or a value."""
        try:
            text = well_formed(json.loads("".join(self._raw), strict=False))
        except ValueError:
            return False
        if self._key is None:
            self._key, self._state = text, self._colon
            return True
        self._state = self._next
        if self._key == "name":
            return self._named(text)
        return self._argued(text)

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._state = self._value
            return True
        return char.isspace()

    def _value(self, char: str) -> bool:
        if char.isspace():
            return True
        self._raw = [char]
        if char == '"':
            self._state = self._string
            return True
        if char in "{[":
            self._depth, self._quoted, self._escaped, self._state = 1, False, False, self._nested
            self._passing = char == "{" and self._key in ARGUMENTS and self._name is not None and not self._live
            if self._passing:
                self._tell("{")
            return True
        self._state = self._scalar
        return char.isalnum() or char == "-"

    def _nested(self, char: str) -> bool:
        if char == "<" and not self._quoted:
            return False  # no JSON: a mark that ends an object which was not closed
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
            self._sink.argue(char)
        else:
            self._raw.append(char)
        if self._depth:
            return True
        self._state = self._next
        if self._passing:
            return True
        return self._key != "name" and self._argued("".join(self._raw), ok=self._raw[0] == "{")

    def _scalar(self, char: str) -> bool:
        if char.isalnum() or char in "+-.":
            self._raw.append(char)
            return True
        self._state = self._next
        found = self._key != "name" and self._argued("{}", ok="".join(self._raw) == "null")
        return found and self._next(char)

    def _next(self, char: str) -> bool:
        if char == ",":
            self._state = self._begin_key
            return True
        return char.isspace() or (char == "}" and self._end())

    # -- what was found

    def _named(self, name: str) -> bool:
        if self._live or self._name is not None:
            return True
        if name not in self._names:
            return False
        self._name = name
        if self._arguments is not None:
            self._tell(self._arguments)
        return True

    def _argued(self, arguments: str, ok: bool = True) -> bool:
        """A value other than a name is complete; only that of arguments matters."""
        if self._key not in ARGUMENTS or self._live or self._arguments is not None:
            return True
        if ok and self._name is not None:
            self._tell(arguments)
        elif ok:
            self._arguments = arguments
        return ok

    def _tell(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name"
        self._live, self._held = True, []
        self.told += 1
        self._sink.call(self._name)
        self._sink.argue(arguments)

    def _end(self) -> bool:
        if not self._live:
            if self._name is None:
                return False
            self._tell("{}")
        self._state, self._live = self._between, False
        return True
