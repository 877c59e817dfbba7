"""What attention does to its scores beside scaling and masking them; an operand of attention ops.

Soft cap: Gemma 2 (arXiv:2408.00118); attention sinks: gpt-oss (arXiv:2508.10925), after
arXiv:2309.17453; ALiBi: arXiv:2108.12409.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScoreMods(NamedTuple):
    """Applied to the scaled scores in this order.

    Attributes:
        softcap: Bound c of the scores s, c · tanh(s / c); None: no bound.
        alibi_slopes: [heads] float32; slope · (key position − query position) is added. None: no
            positional bias.
        sinks: [heads] float32, a logit of each head that softmax's denominator has beside those of
            the keys. None: no sinks.
    """

    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def specialization_key(self) -> tuple[float | None, bool, bool]:
        """What compiled kernels depend on: the cap, and whether there are slopes and sinks."""
        return self.softcap, self.alibi_slopes is not None, self.sinks is not None


NO_SCORE_MODS = ScoreMods()


def softmax_with_score_mods(
    scores: torch.Tensor, distances: torch.Tensor, mask: torch.Tensor | None, mods: ScoreMods
) -> torch.Tensor:
    """The softmax weights of scaled scores.

    Args:
        scores: [heads, queries, keys].
        distances: [queries, keys], key position − query position.
        mask: [queries, keys], keys that a query attends to; None: all.
        mods: What is done to the scores.

    Returns:
        [heads, queries, keys]; with sinks the weights of a query sum to less than 1.
    """
    if mods.softcap is not None:
        scores = (scores / mods.softcap).tanh() * mods.softcap
    if mods.alibi_slopes is not None:
        scores = scores + mods.alibi_slopes.to(scores)[:, None, None] * distances.to(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if mods.sinks is None:
        return scores.softmax(-1)
    sinks = mods.sinks.to(scores)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
