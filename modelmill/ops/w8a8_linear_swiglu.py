"""Gate and up projections in 8 bits and SwiGLU in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from modelmill.ops import fp8_linear, w8a8_linear
from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.linear_cases import linear_case
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.silu_mul import silu_mul
from modelmill.ops.w8a8_linear import Linear8BitInputs, make_linear_8bit_problem

DECLARATION = OpDeclaration(
    fuses=("w8a8_linear", "silu_mul"),
    optional=True,
    inputs=Linear8BitInputs,
    problem=make_linear_8bit_problem,
    per_call="x_scale",
    cost=partial(gemm_cost, matrices=2),
)

# for fp8 (see fp8_linear); for int8 tests/ops/test_cuda_gemm_8bit.py has tighter bounds
TOLERANCE = {torch.float32: 4e-2, torch.float16: 5e-2, torch.bfloat16: 2.5e-1}


def w8a8_linear_swiglu(inputs: Linear8BitInputs) -> torch.Tensor:
    """Compute silu(x Gᵀ) · (x Uᵀ).

    The products are rounded to ``dtype`` before the gate. Inputs as of w8a8_linear and fp8_linear;
    the weight has 2·I rows, G above U, and so have scale and bias.

    Returns:
        [T, I] of ``dtype``.
    """
    int8 = inputs.x.dtype is torch.int8
    product = w8a8_linear.w8a8_linear if int8 else fp8_linear.fp8_linear
    return silu_mul(product(inputs))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Few and many rows, sizes not divisible by any tile; the 7B shape only on a GPU."""
    shapes = [(1, 64, 48), (5, 100, 33), (70, 48, 40)]
    if device != "cpu":
        shapes += [(100, 592, 104), (1000, 4096, 1032), (300, 4096, 11008)]
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Cases of (rows, K, half of the outputs)."""
    for rows, k, inner in shapes:
        for name, make_inputs in (
            ("int8", w8a8_linear.random_inputs),
            ("fp8", fp8_linear.random_inputs),
        ):
            args: dict[str, Any] = make_inputs(
                rows, k, 2 * inner, device=device, per_token=rows != 100
            )
            generator = torch.Generator().manual_seed(inner)
            bias = (
                torch.randn(2 * inner, generator=generator).to(device, dtype)
                if rows in (5, 100)
                else None
            )
            args |= {"dtype": dtype, "bias": bias}
            yield linear_case(args, gated=True, suffix=f"-{name}")
