"""Gate and up projections with 4-bit weights and SwiGLU in one op; no intermediate in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.groupwise import GroupwiseLinearInputs, cases_for_shapes, make_groupwise_problem
from modelmill.ops.int4_linear import int4_linear, random_weight
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.silu_mul import silu_mul

DECLARATION = OpDeclaration(
    fuses=("int4_linear", "silu_mul"),
    optional=True,
    inputs=GroupwiseLinearInputs,
    problem=make_groupwise_problem,
    cost=partial(gemm_cost, matrices=2),
)

TOLERANCE = {torch.float32: 8e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def int4_linear_swiglu(inputs: GroupwiseLinearInputs) -> torch.Tensor:
    """Compute silu(x Gᵀ) · (x Uᵀ).

    The products are rounded to x's dtype before the gate, as two separate ops would do. Inputs as
    of int4_linear; the weight has 2·I rows, G above U, and so have scale, offset and bias.

    Returns:
        [T, I] of x's dtype.
    """
    return silu_mul(int4_linear(inputs))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode rows, odd sizes; the 7B shape only on a GPU."""
    shapes = [(1, 576, 1536, 128), (5, 100, 33, 32), (1, 160, 7, 128), (16, 128, 64, 64)]
    if device != "cpu":
        shapes += [(rows, 4096, 11008, 128) for rows in (1, 8)]
        shapes += [(20, 1536, 520, 128), (64, 4096, 11008, 128), (512, 4096, 11008, 128)]
        shapes += [(1, 1056, 104, 32), (1, 4096, 11008, 64)]
    yield from cases_for_shapes(shapes, random_weight, device, dtype, gated=True)
