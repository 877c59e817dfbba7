"""Matrix product with group-wise 8-bit weights; activations stay floating point.

As int4_linear, with one byte per weight: scale[n, g] · code + offset[n, g], code −128…127, g =
column // group; without offsets the offset is 0 (symmetric). Rows are padded with zeros to a
multiple of 32 columns.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops import groupwise
from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(
    inputs=groupwise.GroupwiseLinearInputs, problem=groupwise.make_groupwise_problem, cost=gemm_cost
)

TOLERANCE = {torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def int8_group_linear(inputs: groupwise.GroupwiseLinearInputs) -> torch.Tensor:
    """Compute x · weightᵀ + bias with the weight dequantized; weight: [N, ⌈K/32⌉·32] int8.

    Weights and sums are float32 (float64 if x is).

    Returns:
        [T, N] of x's dtype.
    """
    return groupwise.matmul_reference(inputs, dequantize_weight)


def pad_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pad int8 codes [N, K] with zeros to [N, ⌈K/32⌉·32]."""
    return F.pad(codes, (0, -codes.shape[1] % groupwise.PACK_COLUMNS)).contiguous()


def unpad_codes(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """The reverse: codes [N, columns]."""
    return weight[:, :columns]


# to [N, columns], of weight, scale, offset, group, columns and the result's dtype
dequantize_weight = functools.partial(groupwise.dequantize_codes, unpad_codes, 0)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill; K odd or not a multiple of 32 or of the group."""
    shapes = [(1, 576, 1536, 32), (5, 100, 33, 32), (33, 576, 96, 64), (1, 1536, 576, 128)]
    shapes += [(2, 65, 7, 96), (70, 544, 65, 64), (65, 99, 40, 32)]
    if device != "cpu":
        shapes += [(1, 4096, 12288, 128), (1, 4096, 4096, 64), (1, 11008, 4096, 32)]
        shapes += [(1, 1056, 608, 32), (1, 1120, 608, 64), (8, 4096, 4096, 64), (20, 992, 64, 32)]
        shapes += [(64, 4096, 4096, 128), (132, 4096, 4096, 32)]
    yield from groupwise.cases_for_shapes(shapes, random_weight, device, dtype)


def random_weight(
    n: int, k: int, group: int, *, device: str, symmetric: bool
) -> dict[str, torch.Tensor | None]:
    """A seeded weight that gives outputs of about unit scale."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scale = (torch.rand(n, -(-k // group), generator=generator) + 0.5) * (k**-0.5 / 74)
    offset = scale * (20 * torch.randn(scale.shape, generator=generator))
    return groupwise.convert_weight_to_case_args(
        pad_codes(codes), scale, None if symmetric else offset, device
    )
