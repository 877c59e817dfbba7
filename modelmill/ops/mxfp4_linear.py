"""Matrix product with MXFP4 weights; activations stay floating point.

OCP Microscaling Formats (MX) specification 1.0, section 5: blocks of 32 columns share a scale of 8
bits, E8M0 (2^(code − 127); 255 is NaN), and each weight is an E2M1 of 4 bits (sign, exponent,
mantissa): ±0, 0.5, 1, 1.5, 2, 3, 4, 6. Codes are packed as in ops/int4_linear.py; scales are
[N, ⌈K/32⌉] uint8. Nothing has an offset.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import groupwise
from modelmill.ops.case import Case
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.int4_linear import pack_codes, unpack_codes
from modelmill.ops.linear_cases import DECODE_7B_SHAPES
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(
    inputs=groupwise.GroupwiseLinearInputs, problem=groupwise.make_groupwise_problem, cost=gemm_cost
)

TOLERANCE = {torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
BLOCK_COLUMNS = 32
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES))
EXPONENT_BIAS, NAN_CODE = 127, 255


def mxfp4_linear(inputs: groupwise.GroupwiseLinearInputs) -> torch.Tensor:
    """Compute x · weightᵀ + bias with the weight dequantized; weight: [N, ⌈K/32⌉·16] uint8.

    Weights and sums are float32 (float64 if x is).

    Returns:
        [T, N] of x's dtype.
    """
    return groupwise.matmul_reference(inputs, dequantize_weight)


def dequantize_weight(
    weight: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None, group: int,
    columns: int, dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """Dequantize to [N, columns]; a floating-point weight is already dequantized."""
    if weight.is_floating_point():
        return weight.to(dtype)
    assert scale is not None, "MXFP4 has scales"
    assert offset is None, "MXFP4 has no offsets"
    values = torch.tensor(E2M1_VALUES, dtype=dtype, device=weight.device)
    wide = values[unpack_codes(weight, columns).long()]
    return wide * groupwise.expand_groups(e8m0_to_scales(scale, dtype), group, columns, dtype)


def e8m0_to_scales(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The scales of E8M0 codes."""
    # of the codes' shape: torch warns that it enlarges a single one
    values = torch.ldexp(torch.ones_like(codes, dtype=dtype), codes.int() - EXPONENT_BIAS)
    return values.masked_fill(codes == NAN_CODE, float("nan"))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill; K odd or not a multiple of 32."""
    shapes = [(1, 576, 1536, 32), (5, 100, 33, 32), (33, 576, 96, 32), (2, 65, 7, 32)]
    shapes += [(70, 544, 65, 32), (16, 96, 24, 32)]
    if device != "cpu":
        shapes += [(*sizes, 32) for sizes in DECODE_7B_SHAPES]
        shapes += [(64, 2880, 5760, 32), (132, 2880, 5760, 32)]
    yield from groupwise.cases_for_shapes(shapes, random_weight, device, dtype)


def random_weight(
    n: int, k: int, group: int, *, device: str, symmetric: bool
) -> dict[str, torch.Tensor | None]:
    """A seeded weight that gives outputs of about unit scale."""
    del symmetric
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    middle = EXPONENT_BIAS - round(0.5 * torch.tensor(9.0 * k).log2().item())
    scale = torch.randint(middle - 1, middle + 2, (n, -(-k // group)), generator=generator)
    tensors = {"weight": pack_codes(codes), "scale": scale.to(torch.uint8)}
    return {name: t.to(device) for name, t in tensors.items()} | {"offset": None}
