"""A budget of tokens for the thinking: when it is spent, the closing mark is forced."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from modelmill.core.types import Grammar, Guide
from modelmill.text.detokenizer import IncrementalUtf8Decoder
from modelmill.text.json_normalizer import suffix_overlap
from modelmill.text.tokenizer_base import Tokenizer


class ThinkingBudget:
    """Counts the tokens of the thinking in one answer."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, value: Mapping[str, Any]) -> None:
        """Start an answer.

        Args:
            tokenizer: the engine's.
            vocab: vocabulary size of the logits.
            value: text of a grammar of the type answer, with marks and budget.
        """
        opening, closing = value["marks"]
        self._tokenizer, self._budget = tokenizer, int(value["budget"])
        self._open, self._close = opening.strip(), closing.strip()
        self._begun = value["thinking"] == "open"
        self._ended = False
        self._text, self._utf8 = "", IncrementalUtf8Decoder()
        self._count = int(value["begun_tokens"])
        self._closing_ids = tuple(
            tokenizer.encode_pieces(["", *tokenizer.split_control_tokens(closing)])
        )
        self._bare_ids = tuple(
            tokenizer.encode_pieces(["", *tokenizer.split_control_tokens(self._close)])
        )
        self._forced: tuple[int, ...] = ()
        self.size = -(-vocab // 8)

    @property
    def ended(self) -> bool:
        """Whether the thinking is over, or the answer has none."""
        return self._ended

    def next_forced_token(self) -> int | None:
        """Return the token that must come next; None if any may."""
        if self._forced:
            return self._forced[0]
        if self._ended or not self._begun:
            return None
        if self._count >= self._budget:
            # after a begun mark the rest of its text would be another one
            self._forced = self._bare_ids if not self._count else self._closing_ids
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        """Count a token."""
        self._forced = self._forced[1:]
        if self._ended:
            return
        self._text += self._utf8.push(self._tokenizer.token_bytes(token))
        if self._begun:
            self._count += 1
            self._ended = self._close in self._text
            self._text = self._text[-len(self._close) :]
            return
        text = self._text.lstrip()
        if text.startswith(self._open):
            self._begun, self._text = True, text[len(self._open) :]
        elif text and suffix_overlap(text, self._open) != len(text):
            self._ended = True


def is_cut_in_forced_thinking_end(
    tokenizer: Tokenizer, grammar: Grammar | None, ids: Sequence[int]
) -> bool:
    """Return whether an answer that was cut ends in a closing mark that a budget forced.

    Args:
        tokenizer: the engine's.
        grammar: of the request.
        ids: the tokens of the answer.
    """
    value = json.loads(grammar.text) if grammar and grammar.grammar_type == "answer" else {}
    if value.get("budget") is None:
        return False
    budget, forced = ThinkingBudget(tokenizer, 0, value), False
    for token in ids:
        forced = budget.next_forced_token() == token
        budget.accept(token)
    return forced and not budget.ended


class ThinkingBudgetGuide:
    """A guide with a budget of the thinking.

    Attributes:
        failed: the grammar could not be followed to its end.
    """

    def __init__(self, guide: Any, budget: ThinkingBudget) -> None:
        """Make the guide; guide: of the whole answer, None if any text may follow."""
        self._guide: Guide | None = guide
        self._budget = budget
        self.failed = False

    def mask(self) -> np.ndarray:
        """Return the mask of the allowed tokens, see ``GrammarGuide.mask``."""
        token = self._budget.next_forced_token()
        full = np.full(self._budget.size, 255, dtype=np.uint8)
        bits: np.ndarray = full if self._guide is None else self._guide.mask()
        self.failed = self._guide is not None and self._guide.failed
        if token is not None and bits[token >> 3] >> (token & 7) & 1:
            bits = np.zeros(self._budget.size, dtype=np.uint8)
            bits[token >> 3] |= 1 << (token & 7)
        return bits

    def accept(self, token: int) -> None:
        """Advance by the sampled token."""
        self._budget.accept(token)
        if self._guide is not None:
            self._guide.accept(token)

    def copy(self) -> ThinkingBudgetGuide:
        """Return a copy in the same state."""
        guide: Any = self._guide
        return ThinkingBudgetGuide(None if guide is None else guide.copy(), copy.copy(self._budget))
