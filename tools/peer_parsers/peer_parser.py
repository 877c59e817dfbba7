"""One parser of a chat format with the tools of a peer's test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from modelmill.text.answer_parser import make_answer_parser
from modelmill.text.answer_pieces import (
    AnswerPiece,
    ParsedAnswer,
    ReasoningDelta,
    ToolCallDelta,
    collect_answer,
)
from modelmill.text.chat_format_registry import list_chat_formats, load_chat_syntax
from modelmill.text.chat_syntax import NO_MARKS, ThinkingSyntax
from tools.peer_parsers.asked_answers import ASKED, AskedAnswer
from tools.peer_parsers.call_deltas import CallDeltas
from tools.peer_parsers.delta_delivery import DELIVERY


class PeerInternalError(AttributeError):
    """A test needs something that is no call, no content and no delta of them."""


class AnyTools(Mapping[str, "Mapping[str, Any] | None"]):
    """Every name is a tool: for tests that declare none."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._schemas = schemas

    def __getitem__(self, name: str) -> Mapping[str, Any] | None:
        """Return a tool's parameters."""
        return self._schemas.get(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the known names."""
        return iter(self._schemas)

    def __len__(self) -> int:
        """Return 1 at least: there are tools."""
        return max(1, len(self._schemas))


class PeerParser:
    """Parses whole answers, and one streamed answer.

    Args:
        format_name: chat format, with the suffix of its tags; None if there is none for the
            peer's parser.
        tools: name → parameters.
        any_name: whether calls of further names are calls.
        peer_class: the peer's parser that it stands for.
    """

    def __init__(
        self,
        format_name: str | None,
        tools: Mapping[str, Mapping[str, Any] | None],
        any_name: bool,
        peer_class: str = "",
    ) -> None:
        if format_name is None or format_name.partition(":")[0] not in list_chat_formats():
            raise PeerInternalError("no chat format stands for this parser")
        self._syntax = load_chat_syntax(format_name)
        self._tools = AnyTools(tools) if any_name else tools
        self._stream = self._make()
        self._deltas = CallDeltas(DELIVERY.cut)
        self._thinking = _ThinkingAsContent(self._syntax.thinking)
        self._answer = -1
        self._asked = AskedAnswer(peer_class, tools, [], streamed=True)

    def _make(self) -> Any:
        return make_answer_parser(self._syntax, self._tools, thinking=self._syntax.thinking)

    def whole(self, text: str) -> ParsedAnswer:
        """Parse a whole answer."""
        ASKED.append(replace(self._asked, pieces=[text], streamed=False))
        parser = self._make()
        pieces = [*parser.push(text), *parser.flush()]
        return collect_answer(_ThinkingAsContent(self._syntax.thinking).convert(pieces))

    def push(self, text: str) -> list[str | ToolCallDelta]:
        """Add text of the streamed answer; returns content and deltas."""
        if self._answer < 0:
            self._answer = DELIVERY.begin_answer()
            ASKED.append(self._asked)
        self._asked.pieces.append(text)
        last = DELIVERY.add_piece(self._answer)
        pieces = [*self._stream.push(text), *(self._stream.flush() if last else ())]
        return list(self._deltas.convert(self._thinking.convert(pieces), last))

    def finish(self) -> list[str | ToolCallDelta]:
        """End the streamed answer, for a peer that says where it ends."""
        pieces = self._stream.flush()
        return list(self._deltas.convert(self._thinking.convert(pieces), last=True))


class _ThinkingAsContent:
    """The peers split thinking off elsewhere: their parsers of calls return it as content."""

    def __init__(self, thinking: ThinkingSyntax | None) -> None:
        self._open, self._close = NO_MARKS if thinking is None else (thinking.open, thinking.close)
        self._thinks = False

    def convert(self, pieces: Iterable[AnswerPiece]) -> Iterator[AnswerPiece]:
        """Yield content and calls, thinking with its marks as content."""
        for piece in pieces:
            is_thinking = isinstance(piece, ReasoningDelta)
            if is_thinking != self._thinks:
                yield self._open if is_thinking else self._close
                self._thinks = is_thinking
            yield piece.text if isinstance(piece, ReasoningDelta) else piece


def schemas(tools: Any) -> dict[str, Mapping[str, Any] | None]:
    """Return name → parameters of the tools of a request."""
    names: dict[str, Mapping[str, Any] | None] = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        function = getattr(function, "function", function)
        if isinstance(function, dict):
            names[function["name"]] = function.get("parameters")
        else:
            names[str(getattr(function, "name", ""))] = getattr(function, "parameters", None)
    return names
