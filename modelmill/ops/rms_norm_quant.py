"""RMSNorm with an 8-bit output: per-token or static scales, optionally permuted channels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.operand_guards import make_row_op_guard
from modelmill.ops.quant_types import MIN_AMAX, QUANT_MAX, ActQuantSpec
from modelmill.ops.rms_norm import rms_norm
from modelmill.ops.row_op_support import RowOpProblem, make_row_op_problem


def _make_problem(
    x: torch.Tensor, weight: torch.Tensor, _: float, spec: ActQuantSpec
) -> RowOpProblem:
    return make_row_op_problem(x, weight, spec=spec)


DECLARATION = OpDeclaration(
    inputs=ActQuantSpec,
    inputs_name="spec",
    problem=_make_problem,
    operands=("x", "weight", "eps", "spec"),
    guard=make_row_op_guard,
)

# In steps of the 8-bit type: a value halfway between two steps may be rounded to either.
TOLERANCE = {torch.float32: 1.0, torch.float16: 1.0, torch.bfloat16: 2.0}
CASE_SHAPES = ((1, 64), (3, 576), (7, 100), (130, 96), (1024, 4096), (5, 8193), (1, 4096))


def rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, eps: float, spec: ActQuantSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize y = rms_norm(x, weight, eps), which is rounded to x's dtype first.

    Values are rounded half to even and clamped to ±448 (fp8), ±(2^(bits − 1) − 1) (int8), or
    −2^(bits − 1) … 2^(bits − 1) − 1 (int8 with zero-points). Below, max is 448 or 2^(bits − 1) − 1.

    Args:
        x: [..., H] float32, float16 or bfloat16.
        weight: [H], x's dtype.
        eps: added to the mean square.
        spec: how y is quantized.

    Returns:
        (values [..., N] of ``spec.dtype``, scale [...] float32 = max(amax, 1e-6) / max, or None if
        static).
    """
    return quantize_rows(rms_norm(x, weight, eps), spec)


def quantize_rows(y: torch.Tensor, spec: ActQuantSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize y [..., H] as described in ``rms_norm_quant``: (values, scale or None)."""
    dtype, inv_scale, zero_point, perm, bits = spec
    min_value, max_value = quant_min_max(dtype, bits, has_zero_point=zero_point is not None)
    y32 = y.float()
    scale = None
    factor = inv_scale
    if factor is None:
        amax = y32.abs().amax(-1).clamp(min=MIN_AMAX)
        # torch computes number / tensor as number · reciprocal: two roundings, kernels have one
        scale, factor = amax / max_value, (torch.full_like(amax, max_value) / amax)[..., None]
    if perm is not None:
        y32 = y32[..., perm.clamp(min=0).long()]
    q = y32 * factor
    if dtype is torch.int8:
        q = q.round() if zero_point is None else q.round() + zero_point
    q = q.clamp(min_value, max_value)
    return (q if perm is None else torch.where(perm >= 0, q, 0.0)).to(dtype), scale


def quant_min_max(dtype: torch.dtype, bits: int, *, has_zero_point: bool) -> tuple[float, float]:
    """(min, max) value; with zero-points the minimum is one step lower."""
    if dtype is not torch.int8:
        return -QUANT_MAX[dtype], QUANT_MAX[dtype]
    max_value = float(2 ** (bits - 1) - 1)
    return -max_value - has_zero_point, max_value


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Odd and usual shapes, each in all quantization modes."""
    for number, (rows, width) in enumerate(CASE_SHAPES):
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        weight = randn(width, device=device, dtype=dtype, seed=width) + 1
        for name, args in named_quant_mode_args(width, device, number):
            moved = nbytes(x, weight) + rows * (args["perm"].numel() if "perm" in args else width)
            yield Case(
                f"{rows}x{width}-{name}", {"x": x, "weight": weight, "eps": 1e-5, **args}, moved
            )


def named_quant_mode_args(
    width: int, device: str, seed: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments) of each way to quantize rows of ``width``."""
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
