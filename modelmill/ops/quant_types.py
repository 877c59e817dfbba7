"""Values in 8 bits beside a float32 scale: int8 in −127 … 127, fp8 (e4m3) in −448 … 448."""

from __future__ import annotations

from typing import NamedTuple

import torch

QUANT_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# An amax below this is taken for it, so that the scale of a row of zeros can be divided by.
MIN_AMAX = 1e-6
# Products of two int8 numbers, at most 2¹⁴ each, that float32 adds up without rounding.
MAX_EXACT_COLUMNS = 1 << 10


class QuantizedInput(NamedTuple):
    """Activations in 8 bits on their way into a product.

    values: [T, K] int8 or e4m3, as the weight wants them (scaled, shifted, in its order). scale:
    [T] float32, each token's own; None where the weight knows it. dtype: what the product's output
    is rounded to.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    dtype: torch.dtype


class ActQuantSpec(NamedTuple):
    """The 8-bit input that a weight multiplies with: arguments of the ops ``rms_norm_quant`` and
    ``quantize``.
    """

    dtype: torch.dtype
    inv_scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    bits: int = 8


def round_to_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, already divided by its scale, in the 8-bit type ``dtype``: half to even, what is out of
    range to the ends.
    """
    most = QUANT_MAX[dtype]
    x = x.round() if dtype is torch.int8 else x
    return x.clamp(-most, most).to(dtype)


def quantize_per_row(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] → (values [..., D] of ``dtype``, scale [...] float32) with one scale for the last
    axis.

    scale = max(amax, 1e-6) / 127 (fp8: / 448), computed in float32; values = x / scale, rounded
    half to even.
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=MIN_AMAX) / QUANT_MAX[dtype]
    return round_to_dtype(wide / scale[..., None], dtype), scale


def exact_int_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., T, K] int8 · weight [..., N, K]ᵀ, int8 or the same integers as float32: [..., T, N],
    exact.

    float64 holds every such sum; float32 holds those of ``MAX_EXACT_COLUMNS`` products, and is read
    twice as fast. What float32 holds is returned in it.
    """
    if weight.dtype is not torch.float32:
        return x.double() @ weight.double().mT
    wide = x.float()
    starts = range(0, x.shape[-1], MAX_EXACT_COLUMNS)
    parts = [
        wide[..., a : a + MAX_EXACT_COLUMNS] @ weight[..., a : a + MAX_EXACT_COLUMNS].mT
        for a in starts
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=torch.float64)
