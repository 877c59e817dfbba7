"""Calls read out of an answer as it comes: content and pieces of calls, which together never have to be taken back.

A call is told once its name is known to be a tool's and its arguments have begun to be an object; from then on its
arguments are passed on as the model writes them. What turns out to be no call before that is content. The same pieces
come out however the text was cut, so an answer read whole and one that is streamed hold the same calls.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelmill.text.objects import Objects
from modelmill.text.tokens import well_formed
from modelmill.text.tools import ARGS, BARE, CALL_ID, CLOSE, LIST, LISTED, OPEN, PYTHON, REACT, TOLD

NAMED = 256
"""Characters within which name[ARGS]{ has to be complete."""
LONGEST_CODE = 4096
_NAME = re.compile(
    rf"\s*([a-zA-Z0-9_-]{{1,64}})\s*({re.escape(CALL_ID)}\s*[a-zA-Z0-9_-]{{1,64}}\s*)?({re.escape(ARGS)})?\s*"
)


@dataclass(frozen=True)
class Part:
    """A piece of a call. index: which of the answer's calls. id, name: in its first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Call:
    """A whole call. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Reader(Protocol):
    """Tells calls from content."""

    def push(self, text: str) -> list[str | Part]:
        """Content and pieces of calls that more text makes sure of, in order."""

    def flush(self, cut: bool = False) -> list[str | Part]:
        """What was held back until the end. cut: the answer might have gone on."""


def reader(
    style: str, names: Sequence[str], *, most: int | None = None, thinking: bool = False, forced: bool = False
) -> Reader:
    """A reader for one answer. most: calls beyond so many are left out. thinking: the prompt ended in "Thought:".

    forced: the answer can be calls only; what was cut before it became one is no content either.
    """
    from modelmill.text.react import ReactReader

    outlet = Outlet(most, short=style == LISTED, silent=forced)
    if style == REACT:
        return ReactReader(names, outlet, thinking)
    return JsonReader(style, names, outlet)


def gathered(pieces: Iterable[str | Part]) -> tuple[str, list[Call]]:
    """The content and the calls that pieces add up to."""
    content, calls = "", list[Call]()
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            calls.append(Call(piece.id or "", piece.name, piece.arguments))
        else:
            last = calls[piece.index]
            calls[piece.index] = Call(last.id, last.name, last.arguments + piece.arguments)
    return content, calls


class Outlet:
    """Where a reader puts what it is sure of. Blanks beside calls are no content."""

    def __init__(self, most: int | None, short: bool, silent: bool = False) -> None:
        """short: ids of nine letters and digits, as Mistral's templates want them.

        silent: there is content only where no call came and the answer was not cut.
        """
        self._most, self._short, self._silent = most, short, silent
        self._unsaid: list[str] = []
        self._blank = ""
        self._pieces: list[str | Part] = []
        self._said = False
        self.calls = 0

    def say(self, text: str) -> None:
        """Content."""
        if self._silent:
            self._unsaid.append(text)
            return
        kept = text.rstrip()
        if kept:
            first = bool(self.calls) and not self._said
            self._pieces.append(kept.lstrip() if first else self._blank + kept)
            self._blank, self._said = "", True
        self._blank += text[len(kept) :]

    def call(self, name: str) -> None:
        """A call begins."""
        id = secrets.token_hex(5)[:9] if self._short else f"call_{secrets.token_hex(12)}"
        self._put(Part(self.calls, "", id, name))
        self.calls += 1

    def argue(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self._put(Part(self.calls - 1, text))

    def _put(self, part: Part) -> None:
        if self._most is not None and part.index >= self._most:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Part) and last.index == part.index:
            part = Part(last.index, last.arguments + part.arguments, last.id, last.name)
            self._pieces.pop()
        self._pieces.append(part)

    def take(self) -> list[str | Part]:
        """What came since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def last(self, cut: bool) -> list[str | Part]:
        """The end. cut: the answer might have gone on."""
        if self._silent and not self.calls and not cut:
            self._silent = False
            self.say("".join(self._unsaid))
        if self._blank and not self.calls:
            self._pieces.append(self._blank)
        return self.take()


class JsonReader:
    """Calls that are JSON: behind a mark (and before another), or the answer itself where nothing stands before it."""

    def __init__(self, style: str, names: Sequence[str], outlet: Outlet) -> None:
        self._names, self._outlet = frozenset(names), outlet
        self._mark, self._close = {BARE: (PYTHON, ""), LISTED: (LIST, "")}.get(style, (OPEN, CLOSE))
        self._buffer = ""
        self._mode: Callable[[], bool] = self._outside
        if style in (BARE, TOLD):  # small models that are told of marks leave them out
            self._begin("")

    def push(self, text: str) -> list[str | Part]:
        """As Reader.push."""
        self._buffer += text
        while self._buffer and self._mode():
            pass
        return self._outlet.take()

    def flush(self, cut: bool = False) -> list[str | Part]:
        """As Reader.flush."""
        rest, self._buffer = self._buffer, ""
        if self._mode == self._outside:
            self._outlet.say(rest)
        elif not (self._mode == self._code and self._called(rest)):
            told = self._objects.told
            # of a block with a call in it, a closing mark that was cut is no content
            self._outlet.say(self._objects.release() if told else self._opened + self._objects.release() + rest)
        return self._outlet.last(cut)

    def _begin(self, mark: str) -> None:
        self._opened, self._mode = mark, self._inside
        self._objects = Objects(self._names, self._outlet)

    def _outside(self) -> bool:
        """Content, until a mark."""
        before, found, after = self._buffer.partition(self._mark)
        if found:
            self._outlet.say(before)
            self._buffer = after
            self._begin(self._mark)
            return True
        keep = overlap(self._buffer, self._mark)
        self._outlet.say(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _inside(self) -> bool:
        """Objects, until something else."""
        for place, char in enumerate(self._buffer):
            if not self._objects.feed(char):
                self._buffer = self._buffer[place:]
                self._mode = self._closing
                if self._opened in (LIST, PYTHON) and self._objects.untouched:
                    self._mode = self._named if self._opened == LIST else self._code
                return True
        self._buffer = ""
        return False

    def _closing(self) -> bool:
        """The closing mark, or else content."""
        if self._close and len(self._buffer) < len(self._close) and self._close.startswith(self._buffer):
            return False
        ended = bool(self._close) and self._buffer.startswith(self._close)
        if ended and self._objects.told:
            self._outlet.say(self._objects.release())
            self._buffer = self._buffer[len(self._close) :]
        else:
            self._leave()
        self._mode = self._outside
        return True

    def _leave(self) -> None:
        """What was held is content, behind its mark where the block holds no call."""
        self._outlet.say(("" if self._objects.told else self._opened) + self._objects.release())
        self._mode = self._outside

    def _named(self) -> bool:
        """name[ARGS]{…"""
        place = self._buffer.find("{", 0, NAMED)
        if place < 0 and len(self._buffer) < NAMED:
            return False
        found = _NAME.fullmatch(self._buffer, 0, place) if place >= 0 else None
        if found is None or found[1] not in self._names:
            self._leave()
            return True
        self._buffer = self._buffer[place:]
        self._objects.begin(found[1])
        self._mode = self._inside
        return True

    def _code(self) -> bool:
        """All of it, since one line of code is complete at its end."""
        return False

    def _called(self, code: str) -> bool:
        """Take code that is name.call(key=value, …) or name(key=value, …) of a tool as a call."""
        found = _read_code(code.strip())
        if found is None or found[0] not in self._names:
            return False
        self._outlet.call(found[0])
        self._outlet.argue(found[1])
        return True


def _read_code(code: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of one call with literal values; None for other code. Nothing is run."""
    if len(code) > LONGEST_CODE:
        return None
    try:
        tree = ast.parse(code, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or not all(word.arg for word in tree.keywords):
            return None
        function = tree.func
        if isinstance(function, ast.Attribute) and function.attr == "call":
            function = function.value
        values = {word.arg: ast.literal_eval(word.value) for word in tree.keywords}
        arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return (function.id, well_formed(arguments)) if isinstance(function, ast.Name) else None


def overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
