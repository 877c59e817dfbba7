"""Incremental parsing of tool calls: an answer's text becomes content and deltas of calls.

Nothing that was emitted changes later. A call is emitted once its name is that of a tool and its
arguments have begun as an object; from then on its arguments are emitted as the model writes them.
Text that turns out not to be a call is content. The result does not depend on how the text was cut
into pieces, so a whole answer and a streamed one have the same calls.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
"""Maximum characters of ``name[ARGS]{``."""
MAX_CODE_CHARS = 4096
_CALL_HEAD = re.compile(
    rf"\s*([a-zA-Z0-9_-]{{1,64}})\s*({re.escape(CALL_ID_MARK)}\s*[a-zA-Z0-9_-]{{1,64}}\s*)?({re.escape(CALL_ARGS_MARK)})?\s*"
)


@dataclass(frozen=True)
class ToolCallDelta:
    """A delta of a tool call.

    Attributes:
        index: index of the call in the answer.
        arguments: JSON text to append.
        id: the call's id, in its first delta only.
        name: the tool's name, in its first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ParsedToolCall:
    """A complete tool call; arguments: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolParser(ABC):
    """Splits an answer into content and tool calls: a state machine over what is still open.

    A state (``_mode``) reads from the buffer and returns whether the next one can go on.
    """

    _mode: Callable[[], bool]

    def __init__(self, names: Sequence[str], output: ParserOutput) -> None:
        self._names, self._output = frozenset(names), output
        self._buffer = ""

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Add text; return the content and deltas of calls that are now certain, in order."""
        self._buffer += text
        while self._buffer and self._mode():
            pass
        return self._output.drain()

    @abstractmethod
    def flush(self, cut: bool = False) -> list[str | ToolCallDelta]:
        """Return what is still buffered; cut: the answer was cut off by a limit."""


def make_tool_parser(
    style: str,
    names: Sequence[str],
    *,
    max_calls: int | None = None,
    thinking: bool = False,
    forced: bool = False,
) -> ToolParser:
    """Make the parser of one answer.

    Args:
        style: how calls are written, see ``tool_prompts``.
        names: names of the tools; a call of another name is content.
        max_calls: further calls are dropped.
        thinking: whether the prompt ended in "Thought:".
        forced: whether a grammar forces calls; the text of a call that was cut off is then not
            content.
    """
    from modelmill.text.react import ReactToolParser

    output = ParserOutput(max_calls, short_ids=style == LISTED_STYLE, silent=forced)
    if style == REACT_STYLE:
        return ReactToolParser(names, output, thinking)
    return JsonToolParser(style, names, output)


def collect_tool_calls(pieces: Iterable[str | ToolCallDelta]) -> tuple[str, list[ParsedToolCall]]:
    """Join content and deltas to the whole content and the complete calls."""
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
    """Collects the output of a parser; whitespace beside calls is not content."""

    def __init__(self, max_calls: int | None, short_ids: bool, silent: bool = False) -> None:
        """Start an answer.

        Args:
            max_calls: further calls are dropped.
            short_ids: ids of nine letters and digits, which Mistral's templates require.
            silent: whether there is content only if no call came and the answer was not cut.
        """
        self._max_calls = max_calls
        self._short_ids = short_ids
        self._silent = silent
        self._withheld: list[str] = []
        self._blank = ""
        self._pieces: list[str | ToolCallDelta] = []
        self._has_text = False
        self.num_calls = 0

    def add_text(self, text: str) -> None:
        """Append text to the answer's content."""
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
        """Begin a call of the function ``name``."""
        id = secrets.token_hex(5)[:9] if self._short_ids else f"call_{secrets.token_hex(12)}"
        self._put(ToolCallDelta(self.num_calls, "", id, name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
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
        """Return what was added since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, cut: bool) -> list[str | ToolCallDelta]:
        """Return the rest at the end; cut: the answer was cut off by a limit."""
        if self._silent and not self.num_calls and not cut:
            self._silent = False
            self.add_text("".join(self._withheld))
        if self._blank and not self.num_calls:
            self._pieces.append(self._blank)
        return self.drain()


class JsonToolParser(ToolParser):
    """Parser of JSON calls: after an opening mark, or an answer that begins with a call."""

    def __init__(self, style: str, names: Sequence[str], output: ParserOutput) -> None:
        super().__init__(names, output)
        self._mark, self._close = {
            BARE_STYLE: (PYTHON_MARK, ""),
            LISTED_STYLE: (CALL_LIST_MARK, ""),
        }.get(style, (CALL_OPEN, CALL_CLOSE))
        self._mode = self._scan_content
        # small models omit the marks even though the prompt describes them
        if style in (BARE_STYLE, DESCRIBED_STYLE):
            self._begin_block("")

    def flush(self, cut: bool = False) -> list[str | ToolCallDelta]:
        """See ``ToolParser.flush``."""
        rest, self._buffer = self._buffer, ""
        if self._mode == self._scan_content:
            self._output.add_text(rest)
        elif not (self._mode == self._parse_code and self._accept_code_call(rest)):
            num_calls = self._objects.num_calls
            # in a block with a call, an incomplete closing mark is not content
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
        """Scan content up to an opening mark."""
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
        """Scan objects up to another character."""
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
        """Scan the closing mark; anything else is content."""
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
        """Emit the buffered text as content, with its opening mark if the block has no call."""
        self._output.add_text(
            ("" if self._objects.num_calls else self._opened) + self._objects.release()
        )
        self._mode = self._scan_content

    def _parse_named_call(self) -> bool:
        """Parse the head of a call, ``name[ARGS]{``."""
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
        """Buffer the code, which is complete only at the end of the answer."""
        return False

    def _accept_code_call(self, code: str) -> bool:
        """Emit a call for code that is name.call(key=value, …) or name(key=value, …) of a tool."""
        match = _parse_python_call(code.strip())
        if match is None or match[0] not in self._names:
            return False
        self._output.begin_call(match[0])
        self._output.add_arguments(match[1])
        return True


def _parse_python_call(code: str) -> tuple[str, str] | None:
    """Parse one call with literal values; the code is not run.

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


def suffix_overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of ``text`` may begin ``mark``."""
    return next(
        (
            size
            for size in range(min(len(mark) - 1, len(text)), 0, -1)
            if mark.startswith(text[-size:])
        ),
        0,
    )
