"""Matrix product with group-wise 4-bit weights; activations stay floating point (W4A16).

Layout of a weight [N, K], made for 16-byte loads: K is padded to a multiple of 32; in each run of
32 columns, byte j (0…15) holds column j in its low nibble and column j + 16 in its high nibble. A
weight is scale[n, g] · code + offset[n, g], code 0…15, g = column // group; without offsets the
offset is −8 · scale (symmetric). Hence y[t, n] = Σ_g scale · (x_g · codes_g) + offset · Σ x_g, so
that a kernel can multiply with the codes directly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops import groupwise
from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.linear_cases import DECODE_7B_SHAPES
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(
    inputs=groupwise.GroupwiseLinearInputs, problem=groupwise.make_groupwise_problem, cost=gemm_cost
)

TOLERANCE = {torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
ZERO_POINT = 8  # the code of 0 in a symmetric weight


def int4_linear(inputs: groupwise.GroupwiseLinearInputs) -> torch.Tensor:
    """Compute x · weightᵀ + bias with the weight dequantized; weight: [N, ⌈K/32⌉·16] uint8.

    Weights and sums are float32 (float64 if x is).

    Returns:
        [T, N] of x's dtype.
    """
    return groupwise.matmul_reference(inputs, dequantize_weight)


def packed_row_bytes(columns: int) -> int:
    """Bytes of a packed row of ``columns`` 4-bit codes."""
    return -(-columns // groupwise.PACK_COLUMNS) * (groupwise.PACK_COLUMNS // 2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes 0…15 [N, K] into [N, ⌈K/32⌉·16] uint8; padding columns are 0."""
    rows, columns = codes.shape
    full = F.pad(codes.to(torch.uint8), (0, -columns % groupwise.PACK_COLUMNS)).view(
        rows, -1, 2, groupwise.PACK_COLUMNS // 2
    )
    return (full[:, :, 0] | (full[:, :, 1] << 4)).reshape(rows, -1).contiguous()


def unpack_codes(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack the result of ``pack_codes`` to [N, columns] uint8."""
    runs = weight.view(weight.shape[0], -1, 1, groupwise.PACK_COLUMNS // 2)
    return torch.cat([runs & 15, runs >> 4], 2).view(weight.shape[0], -1)[:, :columns]


# to [N, columns], of weight, scale, offset, group, columns and the result's dtype
dequantize_weight = functools.partial(groupwise.dequantize_codes, unpack_codes, ZERO_POINT)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill; all group sizes; K odd or not a multiple of 32 or of the group."""
    shapes = [(1, 576, 1536, 128), (5, 100, 33, 32), (33, 576, 96, 64), (1, 1536, 576, 128)]
    shapes += [(2, 65, 7, 96), (40, 1056, 97, 128), (70, 544, 65, 64), (65, 99, 40, 32)]
    if device != "cpu":
        shapes += [(*sizes, 128) for sizes in DECODE_7B_SHAPES]
        shapes += [(8, 4096, 4096, 64), (64, 4096, 4096, 128), (1, 1056, 608, 32)]
        shapes += [(1, 1120, 608, 64), (20, 992, 64, 32), (132, 4096, 4096, 128)]
    yield from groupwise.cases_for_shapes(shapes, random_weight, device, dtype)


def random_weight(
    n: int, k: int, group: int, *, device: str, symmetric: bool
) -> dict[str, torch.Tensor | None]:
    """A seeded weight that gives outputs of about unit scale."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scale = (torch.rand(n, -(-k // group), generator=generator) + 0.5) * (0.2 * k**-0.5)
    offset = -scale * (7.5 + torch.randn(scale.shape, generator=generator))
    return groupwise.convert_weight_to_case_args(
        pack_codes(codes), scale, None if symmetric else offset, device
    )
