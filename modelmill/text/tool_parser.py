"""Calls read out of an answer as it comes: content and pieces of calls, which together never have
to be taken back.

A call is told once its name is known to be a tool's and its arguments have begun to be an object;
from then on its arguments are passed on as the model writes them. What turns out to be no call
before that is content. The same pieces come out however the text was cut, so an answer read whole
and one that is streamed hold the same calls.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from modelmill.text.tokenizer_base import replace_surrogates
from modelmill.text.tool_json import ToolJsonParser
from modelmill.text.tool_prompts import (
    BARE_STYLE,
    CALL_ARGS_MARK,
    CALL_CLOSE,
    CALL_ID_MARK,
    CALL_LIST_MARK,
    CALL_OPEN,
    DESCRIBED_STYLE,
    LISTED_STYLE,
    PYTHON_MARK,
    REACT_STYLE,
)

MAX_CALL_HEAD_CHARS = 256
"""Characters within which name[ARGS]{ has to be complete."""
MAX_CODE_CHARS = 4096
_CALL_HEAD = re.compile(
    rf"\s*([a-zA-Z0-9_-]{{1,64}})\s*({re.escape(CALL_ID_MARK)}\s*[a-zA-Z0-9_-]{{1,64}}\s*)?({re.escape(CALL_ARGS_MARK)})?\s*"
)


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call. index: which of the answer's calls. id, name: in its first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ParsedToolCall:
    """A whole call. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolParser(Protocol):
    """Tells calls from content."""

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Content and pieces of calls that more text makes sure of, in order."""

    def flush(self, cut: bool = False) -> list[str | ToolCallDelta]:
        """Emit the text buffered at the end; cut: the answer was cut off by a limit."""


def make_tool_parser(
    style: str,
    names: Sequence[str],
    *,
    max_calls: int | None = None,
    thinking: bool = False,
    forced: bool = False,
) -> ToolParser:
    """A reader for one answer. max_calls: calls beyond so many are left out. thinking: the prompt
    ended in "Thought:".

    forced: the answer can be calls only; what was cut before it became one is no content either.
    """
    from modelmill.text.react import ReactToolParser

    outlet = ParserOutput(max_calls, short_ids=style == LISTED_STYLE, silent=forced)
    if style == REACT_STYLE:
        return ReactToolParser(names, outlet, thinking)
    return JsonToolParser(style, names, outlet)


def collect_tool_calls(pieces: Iterable[str | ToolCallDelta]) -> tuple[str, list[ParsedToolCall]]:
    """The content and the calls that pieces add up to."""
    content, calls = "", list[ParsedToolCall]()
    for piece in pieces:
        if isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            calls.append(ParsedToolCall(piece.id or "", piece.name, piece.arguments))
        else:
            last = calls[piece.index]
            calls[piece.index] = ParsedToolCall(
                last.id, last.name, last.arguments + piece.arguments
            )
    return content, calls


class ParserOutput:
    """Where a reader puts what it is sure of. Blanks beside calls are no content."""

    def __init__(self, max_calls: int | None, short_ids: bool, silent: bool = False) -> None:
        """short_ids: ids of nine letters and digits, as Mistral's templates want them.

        silent: there is content only where no call came and the answer was not cut.
        """
        self._max_calls, self._short_ids, self._silent = max_calls, short_ids, silent
        self._withheld: list[str] = []
        self._blank = ""
        self._pieces: list[str | ToolCallDelta] = []
        self._has_text = False
        self.num_calls = 0

    def add_text(self, text: str) -> None:
        """Content."""
        if self._silent:
            self._withheld.append(text)
            return
        kept = text.rstrip()
        if kept:
            first = bool(self.num_calls) and not self._has_text
            self._pieces.append(kept.lstrip() if first else self._blank + kept)
            self._blank, self._has_text = "", True
        self._blank += text[len(kept) :]

    def begin_call(self, name: str) -> None:
        """A call begins."""
        id = secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        self._put(ToolCallDelta(self.num_calls, "", id, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text:
            self._put(ToolCallDelta(self.num_calls - 1, text))

    def _put(self, delta: ToolCallDelta) -> None:
        if self._max_calls is not None and delta.index >= self._max_calls:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ToolCallDelta) and last.index == delta.index:
            delta = ToolCallDelta(last.index, last.arguments + delta.arguments, last.id, last.name)
            self._pieces.pop()
        self._pieces.append(delta)

    def drain(self) -> list[str | ToolCallDelta]:
        """What came since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, cut: bool) -> list[str | ToolCallDelta]:
        """The end. cut: the answer might have gone on."""
        if self._silent and not self.num_calls and not cut:
            self._silent = False
            self.add_text("".join(self._withheld))
        if self._blank and not self.num_calls:
            self._pieces.append(self._blank)
        return self.drain()


class JsonToolParser:
    """Calls that are JSON: behind a mark (and before another), or the answer itself where nothing
    stands before it.
    """

    def __init__(self, style: str, names: Sequence[str], output: ParserOutput) -> None:
        self._names, self._output = frozenset(names), output
        self._mark, self._close = {
            BARE_STYLE: (PYTHON_MARK, ""),
            LISTED_STYLE: (CALL_LIST_MARK, ""),
        }.get(style, (CALL_OPEN, CALL_CLOSE))
        self._buffer = ""
        self._mode: Callable[[], bool] = self._scan_content
        # small models omit the marks even if the prompt describes them
        if style in (BARE_STYLE, DESCRIBED_STYLE):
            self._begin_block("")

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """As Reader.push."""
        self._buffer += text
        while self._buffer and self._mode():
            pass
        return self._output.drain()

    def flush(self, cut: bool = False) -> list[str | ToolCallDelta]:
        """As Reader.flush."""
        rest, self._buffer = self._buffer, ""
        if self._mode == self._scan_content:
            self._output.add_text(rest)
        elif not (self._mode == self._parse_code and self._accept_code_call(rest)):
            num_calls = self._objects.num_calls
            # of a block with a call in it, a closing mark that was cut is no content
            self._output.add_text(
                self._objects.release()
                if num_calls
                else self._opened + self._objects.release() + rest
            )
        return self._output.finish(cut)

    def _begin_block(self, mark: str) -> None:
        self._opened, self._mode = mark, self._scan_objects
        self._objects = ToolJsonParser(self._names, self._output)

    def _scan_content(self) -> bool:
        """Content, until a mark."""
        before, match, after = self._buffer.partition(self._mark)
        if match:
            self._output.add_text(before)
            self._buffer = after
            self._begin_block(self._mark)
            return True
        keep = suffix_overlap(self._buffer, self._mark)
        self._output.add_text(self._buffer[: len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep :]
        return False

    def _scan_objects(self) -> bool:
        """Objects, until something else."""
        for place, char in enumerate(self._buffer):
            if not self._objects.feed(char):
                self._buffer = self._buffer[place:]
                self._mode = self._scan_close_mark
                if self._opened in (CALL_LIST_MARK, PYTHON_MARK) and self._objects.is_blank:
                    self._mode = (
                        self._parse_named_call
                        if self._opened == CALL_LIST_MARK
                        else self._parse_code
                    )
                return True
        self._buffer = ""
        return False

    def _scan_close_mark(self) -> bool:
        """The closing mark, or else content."""
        if (
            self._close
            and len(self._buffer) < len(self._close)
            and self._close.startswith(self._buffer)
        ):
            return False
        ended = bool(self._close) and self._buffer.startswith(self._close)
        if ended and self._objects.num_calls:
            self._output.add_text(self._objects.release())
            self._buffer = self._buffer[len(self._close) :]
        else:
            self._abandon_block()
        self._mode = self._scan_content
        return True

    def _abandon_block(self) -> None:
        """What was held is content, behind its mark where the block holds no call."""
        self._output.add_text(
            ("" if self._objects.num_calls else self._opened) + self._objects.release()
        )
        self._mode = self._scan_content

    def _parse_named_call(self) -> bool:
        """name[ARGS]{…"""
        place = self._buffer.find("{", 0, MAX_CALL_HEAD_CHARS)
        if place < 0 and len(self._buffer) < MAX_CALL_HEAD_CHARS:
            return False
        match = _CALL_HEAD.fullmatch(self._buffer, 0, place) if place >= 0 else None
        if match is None or match[1] not in self._names:
            self._abandon_block()
            return True
        self._buffer = self._buffer[place:]
        self._objects.begin(match[1])
        self._mode = self._scan_objects
        return True

    def _parse_code(self) -> bool:
        """All of it, since one line of code is complete at its end."""
        return False

    def _accept_code_call(self, code: str) -> bool:
        """Take code that is name.call(key=value, …) or name(key=value, …) of a tool as a call."""
        match = _parse_python_call(code.strip())
        if match is None or match[0] not in self._names:
            return False
        self._output.begin_call(match[0])
        self._output.add_arguments(match[1])
        return True


def _parse_python_call(code: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of one call with literal values; None for other code.

    Nothing is run.
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


def suffix_overlap(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that may begin ``mark``."""
    return next(
        (
            size
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if mark.startswith(text[-size:])
        ),
        0,
    )
