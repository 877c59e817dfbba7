"""Pieces of an answer as the deltas that a test wants to receive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modelmill.text.answer_pieces import AnswerPiece, ReasoningDelta, ToolCallDelta
from tools.chat_formats.check_answers import is_json
from tools.peer_parsers.delta_delivery import DeltaCut


class CallDeltas:
    """Cuts the calls of one answer into deltas."""

    def __init__(self, cut: DeltaCut) -> None:
        self._cut = cut
        self._open: ToolCallDelta | None = None

    def convert(self, pieces: Iterable[AnswerPiece], last: bool) -> Iterator[str | ToolCallDelta]:
        """Yield content and deltas; last: the answer ends."""
        for piece in pieces:
            if isinstance(piece, str):
                yield piece
            elif not isinstance(piece, ReasoningDelta):
                yield from self._call(piece)
        if last and self._open is not None:
            yield self._open
            self._open = None

    def _call(self, piece: ToolCallDelta) -> Iterator[ToolCallDelta]:
        if self._cut == DeltaCut.WHOLE_CALL:
            yield from self._gather(piece)
        elif self._cut == DeltaCut.NAME_FIRST and piece.name is not None and piece.arguments:
            yield ToolCallDelta(piece.index, "", piece.id, piece.name)
            yield ToolCallDelta(piece.index, piece.arguments)
        else:
            yield piece

    def _gather(self, piece: ToolCallDelta) -> Iterator[ToolCallDelta]:
        """Gather a call until its arguments are complete."""
        if self._open is not None and self._open.index == piece.index:
            arguments = self._open.arguments + piece.arguments
            piece = ToolCallDelta(piece.index, arguments, self._open.id, self._open.name)
        elif self._open is not None:
            yield self._open
        self._open = piece
        if is_json(piece.arguments):
            yield piece
            self._open = None
