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
        parser = self._parser
        begins_inside, num_thoughts = parser.in_reasoning, parser.num_thoughts
        pieces = parser.push(text)
        if begins_inside or parser.num_thoughts > num_thoughts:
            self.count += num_tokens
        return pieces


def count_reasoning_tokens(
    pieces: Iterable[AnswerPiece],
    num_thoughts: int,
    token_ids: Sequence[int],
    parser: AnswerParser,
    detokenizer: Detokenizer | None,
) -> int:
    """Count the tokens of thinking in a whole answer, by reading them one by one.

    Args:
        pieces: of the answer.
        num_thoughts: that the answer has, also of no visible text; without any nothing is read.
        token_ids: of the answer, without the token that ended it.
        parser: a new one.
        detokenizer: at the beginning of the answer; None: the engine has no text.
    """
    remaining = sum(len(piece.text) for piece in pieces if isinstance(piece, ReasoningDelta))
    if not num_thoughts or detokenizer is None:
        return 0
    counter = ReasoningTokenCounter(parser)
    for id in token_ids:
        for piece in counter.push(detokenizer.push(id), 1):
            remaining -= len(piece.text) if isinstance(piece, ReasoningDelta) else 0
        if remaining <= 0 and parser.num_thoughts >= num_thoughts and not parser.in_reasoning:
            break
    return counter.count
