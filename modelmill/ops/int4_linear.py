"""Matrix product with 4-bit weights in groups along K; activations stay floating point.

Layout of a weight [N, K], made for reading 16 bytes at a time: K is filled up to a multiple of 32,
and in each run of 32 columns byte j (0…15) holds column j in its low half and column j + 16 in its
high half. A weight is
scale[n, g] · code + offset[n, g], code 0…15, g = column // group; without offsets −8 · scale is
meant (symmetric). Hence y[t, n] = Σ_g scale · (x_g · codes_g) + offset · Σ x_g: a kernel multiplies
with the bare codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case
from modelmill.ops.groupwise import PACK_COLUMNS, cases_for_shapes, expand_groups, matmul_reference

TOLERANCE = {torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
ZERO_POINT = 8  # the code of 0 where there are no offsets


def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [T, K] float; weight: [N, ⌈K/32⌉·16] uint8; scale, offset: [N, ⌈K/group⌉] float16 or
    float32; bias: [N].

    group: a multiple of 32. Returns [T, N] of x's dtype. Weights and sums are float32 (float64
    where x is).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return matmul_reference(
        x, dequantize_weight(weight, scale, offset, group, x.shape[-1], wide), bias
    )


def dequantize_weight(
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    columns: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weights [N, columns]; those that are floating point have been unpacked before."""
    if weight.is_floating_point():
        return weight.to(dtype)
    values = unpack_codes(weight, columns).to(dtype)
    step = expand_groups(scale, group, columns, dtype)
    return (
        (values - ZERO_POINT) * step
        if offset is None
        else values * step + expand_groups(offset, group, columns, dtype)
    )


def packed_bytes(columns: int) -> int:
    """Bytes of a packed row."""
    return -(-columns // PACK_COLUMNS) * (PACK_COLUMNS // 2)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes 0…15 → [N, ⌈K/32⌉·16] uint8; what fills up K is 0."""
    rows, columns = codes.shape
    full = F.pad(codes.to(torch.uint8), (0, -columns % PACK_COLUMNS)).view(
        rows, -1, 2, PACK_COLUMNS // 2
    )
    return (full[:, :, 0] | (full[:, :, 1] << 4)).reshape(rows, -1).contiguous()


def unpack_codes(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse of ``pack_codes``: [N, columns] uint8."""
    runs = weight.view(weight.shape[0], -1, 1, PACK_COLUMNS // 2)
    return torch.cat([runs & 15, runs >> 4], 2).view(weight.shape[0], -1)[:, :columns]


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill, groups of every size, K that is no multiple of the group, of 32, or
    odd.
    """
    shapes = [
        (1, 576, 1536, 128),
        (5, 100, 33, 32),
        (33, 576, 96, 64),
        (1, 1536, 576, 128),
        (2, 65, 7, 96),
    ]
    shapes += [(40, 1056, 97, 128), (70, 544, 65, 64), (65, 99, 40, 32)]
    if device != "cpu":
        shapes += [
            (1, 4096, 12288, 128),
            (1, 4096, 4096, 128),
            (1, 4096, 22016, 128),
            (1, 11008, 4096, 128),
        ]
        shapes += [
            (8, 4096, 4096, 64),
            (64, 4096, 4096, 128),
            (1, 1056, 608, 32),
            (1, 1120, 608, 64),
            (20, 992, 64, 32),
            (132, 4096, 4096, 128),
        ]
    yield from cases_for_shapes(shapes, random_weight, device, dtype)


def random_weight(
    n: int, k: int, group: int, *, device: str, symmetric: bool
) -> dict[str, torch.Tensor | None]:
    """A seeded weight whose outputs have about unit scale."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scale = (torch.rand(n, -(-k // group), generator=generator) + 0.5) * (0.2 * k**-0.5)
    offset = -scale * (7.5 + torch.randn(scale.shape, generator=generator))
    held = {
        "weight": pack_codes(codes),
        "scale": scale.half(),
        "offset": None if symmetric else offset.half(),
    }
    return {name: None if t is None else t.to(device) for name, t in held.items()}
