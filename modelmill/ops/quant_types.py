"""8-bit values with a float32 scale: int8 in −127 … 127, fp8 (e4m3) in −448 … 448."""

from __future__ import annotations

from typing import NamedTuple

import torch

QUANT_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Lower bound of amax, so that the scale of a row of zeros is not 0.
MIN_AMAX = 1e-6
# Number of int8 × int8 products (at most 2¹⁴ each) whose sum is exact in float32.
MAX_EXACT_FLOAT32_PRODUCTS = 1 << 10


class QuantizedInput(NamedTuple):
    """Activations quantized to 8 bits, the input of a matrix product.

    Attributes:
        values: [T, K] int8 or e4m3, scaled, shifted and permuted as the weight requires.
        scale: [T] float32, one per token; None if it is static and stored with the weight.
        dtype: dtype of the product's output.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    dtype: torch.dtype


class ActQuantSpec(NamedTuple):
    """8-bit input that a weight requires: how ``quantize`` and the fused norms make it.

    Attributes:
        dtype: torch.int8 or torch.float8_e4m3fn.
        inv_scale: 1 / scale, float32, multiplied with y before rounding: [1] for all or [N] per
            output column; None: dynamic, each token's max / max(amax, 1e-6), amax of its y.
        zero_point: [N] int32, added after rounding; only with int8 and a static inv_scale.
        perm: [N] int32, N may differ from H; column i of the values is y's column perm[i], or zeros
            (not the zero-point) where that is −1; None: no permutation.
        bits: 8 or less, for int8.
    """

    dtype: torch.dtype
    inv_scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    bits: int = 8


def round_to_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round x, already divided by its scale, to the 8-bit type ``dtype``.

    Rounds half to even; values out of range are clamped.
    """
    limit = QUANT_MAX[dtype]
    x = x.round() if dtype is torch.int8 else x
    return x.clamp(-limit, limit).to(dtype)


def quantize_per_row(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to 8 bits with one scale per row (last axis).

    Args:
        x: [..., D], floating point.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        Values [..., D] of ``dtype`` = x / scale, rounded half to even, and scale [...] float32 =
        max(amax, 1e-6) / 127 (fp8: / 448).
    """
    x32 = x.float()
    scale = x32.abs().amax(-1).clamp(min=MIN_AMAX) / QUANT_MAX[dtype]
    return round_to_dtype(x32 / scale[..., None], dtype), scale


def exact_int_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact integer product x · weightᵀ.

    float64 holds every such sum. float32 holds sums of ``MAX_EXACT_FLOAT32_PRODUCTS`` and is read
    twice as fast.

    Args:
        x: [..., T, K] int8.
        weight: [..., N, K] int8, or the same integers as float32.

    Returns:
        [..., T, N] float64, or float32 where float32 is exact.
    """
    if weight.dtype is not torch.float32:
        return x.double() @ weight.double().mT
    x32 = x.float()
    starts = range(0, x.shape[-1], MAX_EXACT_FLOAT32_PRODUCTS)
    parts = [
        x32[..., a : a + MAX_EXACT_FLOAT32_PRODUCTS]
        @ weight[..., a : a + MAX_EXACT_FLOAT32_PRODUCTS].mT
        for a in starts
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=torch.float64)
