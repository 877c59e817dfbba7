"""Soft cap, ALiBi and sinks inside attention kernels; scores are to the base of two.

Computes: c · tanh(s / c); s + slope · distance; the sinks' share of softmax's denominator
Dtypes: float32
Layout: slopes and sinks [heads] float32
Range: any number of scores
Technique: constexpr switches: kernels without them are unchanged
Used by: paged_attention.py, paged_decode.py, paged_latent.py, paged_prefill.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from modelmill.ops.score_mods import NO_SCORE_MODS, ScoreMods

LOG2E = 1.4426950408889634


class KernelScoreMods(NamedTuple):
    """What kernels take of ``ScoreMods``.

    Attributes:
        slopes, sinks: [heads] float32; any tensor where there are none.
        softcap: The cap times log2(e); 0: none.
        has_slopes, has_sinks: Whether there are any.
    """

    slopes: torch.Tensor
    sinks: torch.Tensor
    softcap: float
    has_slopes: bool
    has_sinks: bool

    @classmethod
    def from_score_mods(cls, mods: ScoreMods | None, unused: torch.Tensor) -> KernelScoreMods:
        """``unused``: stands in the place of absent tensors."""
        softcap, slopes, sinks = mods or NO_SCORE_MODS
        return cls(
            unused if slopes is None else slopes,
            unused if sinks is None else sinks,
            0.0 if softcap is None else softcap * LOG2E,
            slopes is not None,
            sinks is not None,
        )

    @property
    def constexpr_args(self) -> dict[str, float | bool]:
        """The kernels' constexprs."""
        return {"SOFTCAP": self.softcap, "ALIBI": self.has_slopes, "SINKS": self.has_sinks}


@triton.jit
def apply_softcap(score, SOFTCAP: tl.constexpr):
    """SOFTCAP · tanh(score / SOFTCAP), with tanh(x) = 1 − 2 / (1 + e^2x).

    Near 0 that difference would lose the digits of x: there it is x − x³ / 3 + 2 x⁵ / 15, whose
    next term is below 6e-8 of x.
    """
    x = score / SOFTCAP
    square = x * x
    near_zero = score * (1.0 + square * (square * 0.13333333333333333 - 0.3333333333333333))
    far = SOFTCAP - 2.0 * SOFTCAP / (1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(square < 0.01, near_zero, far)


@triton.jit
def load_log2_scaled_head_values(values_ptr, head):
    """Slopes or sinks of heads, times log2(e)."""
    return tl.load(values_ptr + head).to(tl.float32) * 1.4426950408889634
