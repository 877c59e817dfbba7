"""RMSNorm whose output is 8-bit: scaled by token or by calibration, its channels in another order
if one is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.quant_types import MIN_AMAX, QUANT_MAX
from modelmill.ops.rms_norm import rms_norm

# In steps of the 8-bit type: a value at the border between two may fall to either.
TOLERANCE = {torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 2.0}
SHAPES = ((1, 64), (3, 576), (7, 100), (130, 96), (1024, 4096), (5, 8193), (1, 4096))


def rms_norm_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values [..., N] of ``dtype``, scale [...] float32 or None) of y = rms_norm(x, weight, eps),
    rounded to x's dtype.

    x: [..., H] float32/16/bf16. weight: [H], x's dtype. dtype: torch.int8 or torch.float8_e4m3fn.
    perm: [N] int32,
    N ≤ H or not: column i of the values is y's column perm[i], and zeros (not the zero-point) where
    that is −1;
    None: all in their order. inv_scale: what y is multiplied by before it is rounded, 1 / scale,
    float32: [1] for all, or [N] for each column of the values; None: the token's own, largest /
    max(amax of its y, 1e-6), and the scale that undoes it, max(amax, 1e-6) / largest, is returned.
    zero_point: [N] int32 zero-points, added after the rounding; int8 and a static inv_scale only.
    Rounded half to even and held at the ends: ±448 (fp8), ±(2^(bits − 1) − 1), with zero-points
    −2^(bits − 1) … 2^(bits − 1) − 1. largest: 448 or 2^(bits − 1) − 1.
    """
    return quantize_rows(rms_norm(x, weight, eps), dtype, inv_scale, zero_point, perm, bits)


def quantize_rows(
    y: torch.Tensor,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    perm: torch.Tensor | None,
    bits: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The 8-bit values of y [..., H] and the scales of its rows, as ``rms_norm_quant`` says."""
    least, most = quant_range(dtype, bits, has_zero_point=zero_point is not None)
    wide, scale, by = y.float(), None, inv_scale
    if by is None:
        amax = wide.abs().amax(-1).clamp(min=MIN_AMAX)
        # torch would make a product with the reciprocal of a number over a tensor: two roundings
        # where kernels have one
        scale, by = amax / most, (torch.full_like(amax, most) / amax)[..., None]
    if perm is not None:
        wide = wide[..., perm.clamp(min=0).long()]
    q = wide * by
    if dtype is torch.int8:
        q = q.round() if zero_point is None else q.round() + zero_point
    q = q.clamp(least, most)
    return (q if perm is None else torch.where(perm >= 0, q, 0.0)).to(dtype), scale


def quant_range(dtype: torch.dtype, bits: int, *, has_zero_point: bool) -> tuple[float, float]:
    """(least, most) value; has_zero_point: zero-points make use of the one number more below 0."""
    if dtype is not torch.int8:
        return -QUANT_MAX[dtype], QUANT_MAX[dtype]
    most = float(2 ** (bits - 1) - 1)
    return -most - has_zero_point, most


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Odd and usual shapes, each in one of the forms."""
    for number, (rows, width) in enumerate(SHAPES):
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        for name, args in quant_modes(width, device, number):
            moved = nbytes(x, weight) + rows * (args["perm"].numel() if "perm" in args else width)
            yield Case(
                f"{rows}x{width}-{name}", {"x": x, "weight": weight, "eps": 1e-5, **args}, moved
            )


def quant_modes(width: int, device: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments) of every way to quantize rows of ``width``."""
    int8, fp8 = torch.int8, torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(width, generator=generator).int()
    padded = torch.cat([order, order.new_full((5,), -1)]).to(device)
    factor = (torch.rand(width, generator=generator) * 40 + 10).to(device)
    zero = torch.randint(-90, 90, (width,), generator=generator).int().to(device)
    order = order.to(device)
    yield "int8-token", {"dtype": int8}
    yield "fp8-token", {"dtype": fp8}
    yield "int8-static", {"dtype": int8, "inv_scale": factor[:1]}
    yield "fp8-static", {"dtype": fp8, "inv_scale": factor[:1]}
    yield "int8-token-order", {"dtype": int8, "perm": order if width % 1024 == 0 else padded}
    yield "int8-groups", {"dtype": int8, "inv_scale": factor, "zero_point": zero, "perm": order}
    yield (
        "int4-groups",
        {
            "dtype": int8,
            "inv_scale": factor / 16,
            "zero_point": zero // 16,
            "perm": order,
            "bits": 4,
        },
    )
