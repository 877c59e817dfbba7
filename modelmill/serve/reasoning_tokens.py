"""Counts the tokens of an answer's thinking, the mark that ends it included."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from modelmill.text.answer_parser import AnswerParser
from modelmill.text.answer_pieces import AnswerPiece, ReasoningDelta
from modelmill.text.detokenizer import Detokenizer


class ReasoningTokenCounter:
    """Counts as an answer is parsed.

    Attributes:
        count: tokens of thinking so far.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self.count = 0

    def push(self, text: str, num_tokens: int) -> list[AnswerPiece]:
        """Parse new text of so many tokens; returns its pieces."""
        begins_inside = self._parser.in_reasoning
        pieces = self._parser.push(text)
        if begins_inside or self._parser.in_reasoning or any(map(_is_reasoning, pieces)):
            self.count += num_tokens
        return pieces


def count_reasoning_tokens(
    pieces: Iterable[AnswerPiece],
    token_ids: Sequence[int],
    parser: AnswerParser,
    detokenizer: Detokenizer | None,
) -> int:
    """Count the tokens of thinking in a whole answer, by reading them one by one.

    Args:
        pieces: of the answer; without thinking nothing is read.
        token_ids: of the answer, without the token that ended it.
        parser: a new one.
        detokenizer: at the beginning of the answer; None: the engine has no text.
    """
    remaining = sum(len(piece.text) for piece in pieces if isinstance(piece, ReasoningDelta))
    if not remaining or detokenizer is None:
        return 0
    counter = ReasoningTokenCounter(parser)
    for id in token_ids:
        for piece in counter.push(detokenizer.push(id), 1):
            remaining -= len(piece.text) if isinstance(piece, ReasoningDelta) else 0
        if remaining <= 0 and not parser.in_reasoning:
            break
    return counter.count


def _is_reasoning(piece: AnswerPiece) -> bool:
    return isinstance(piece, ReasoningDelta)
