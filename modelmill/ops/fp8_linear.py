"""Matrix product with fp8 (e4m3) weights; activations in fp8 or floating point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.linear_cases import linear_case
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.quant_types import quantize_per_row
from modelmill.ops.w8a8_linear import (
    Linear8BitInputs,
    case_args,
    case_args_with_quantized_x,
    case_shapes,
    make_linear_8bit_problem,
)

DECLARATION = OpDeclaration(
    inputs=Linear8BitInputs, problem=make_linear_8bit_problem, per_call="x_scale", cost=gemm_cost
)

FP8_DTYPE = torch.float8_e4m3fn
# Hopper's tensor cores accumulate fp8 products with about 14 bits: among 12 million sums of 4,096
# terms the largest error is 1.3 % of a typical result (0.2 % over all), while rounding to fp8 costs
# 3 to 4 %.
TOLERANCE = {torch.float32: 2e-2, torch.float16: 2.5e-2, torch.bfloat16: 6e-2}


def fp8_linear(inputs: Linear8BitInputs) -> torch.Tensor:
    """Compute (Σ x · w) · x_scale · scale + bias.

    Products and sums are float32 (float64 if the scales are), rounded once.

    Returns:
        [T, N] of ``dtype``.
    """
    x, weight, scale, x_scale, dtype, bias = inputs
    out = (x.to(scale.dtype) @ weight.to(scale.dtype).T) * scale
    if x_scale is not None:
        out = out * x_scale[:, None]
    return (out if bias is None else out + bias).to(dtype)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of w8a8_linear, each with fp8 and with floating-point activations."""
    for rows, k, n in case_shapes(device):
        args = case_args(random_inputs, rows, k, n, device=device, dtype=dtype)
        yield linear_case(args, suffix="-8x8")
        x = randn(rows, k, device=device, dtype=dtype, seed=rows + k)
        yield linear_case(args | {"x": x, "x_scale": None}, suffix="-16x8")


def random_inputs(
    rows: int, k: int, n: int, *, device: str, per_token: bool = True, per_channel: bool = True
) -> dict[str, Any]:
    """Seeded x, weight and their scales."""
    x = randn(rows, k, device="cpu", dtype=torch.float32, seed=rows + k)
    weight32 = randn(n, k, device="cpu", dtype=torch.float32, seed=n, scale=k**-0.5)
    weight = quantize_per_row(weight32 if per_channel else weight32.flatten(), FP8_DTYPE)
    return case_args_with_quantized_x(x if per_token else x.flatten(), weight, (rows, k, n), device)
