"""Values in 8 bits beside a float32 scale: int8 in −127 … 127, fp8 (e4m3) in −448 … 448."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# An amax below this is taken for it, so that the scale of a row of zeros can be divided by.
LEAST = 1e-6
# Products of two int8 numbers, at most 2¹⁴ each, that float32 adds up without rounding.
EXACT_COLUMNS = 1 << 10


class Quantized(NamedTuple):
    """Activations in 8 bits on their way into a product.

    values: [T, K] int8 or e4m3, as the weight wants them (scaled, shifted, in its order). scale: [T] float32, each
    token's own; None where the weight knows it. dtype: what the product's output is rounded to.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    dtype: torch.dtype


class Wanted(NamedTuple):
    """The 8-bit input that a weight multiplies with: arguments of the ops ``rms_norm_quant`` and ``quantize``."""

    kind: torch.dtype
    factor: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    bits: int = 8


def rounded(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """x, already divided by its scale, in the 8-bit type ``kind``: half to even, what is out of range to the ends."""
    most = LARGEST[kind]
    x = x.round() if kind is torch.int8 else x
    return x.clamp(-most, most).to(kind)


def by_row(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] → (values [..., D] of ``kind``, scale [...] float32) with one scale for the last axis.

    scale = max(amax, 1e-6) / 127 (fp8: / 448), computed in float32; values = x / scale, rounded half to even.
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=LEAST) / LARGEST[kind]
    return rounded(wide / scale[..., None], kind), scale


def integer_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., T, K] int8 · weight [..., N, K]ᵀ, int8 or the same integers as float32: [..., T, N] float64, exact.

    float64 holds every such sum; float32 holds those of ``EXACT_COLUMNS`` products, and is read twice as fast.
    """
    if weight.dtype is not torch.float32:
        return x.double() @ weight.double().mT
    wide = x.float()
    starts = range(0, x.shape[-1], EXACT_COLUMNS)
    parts = [wide[..., a : a + EXACT_COLUMNS] @ weight[..., a : a + EXACT_COLUMNS].mT for a in starts]
    return sum((part.double() for part in parts[1:]), parts[0].double())
