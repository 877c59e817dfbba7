"""Products of one row with 4- and 8-bit weights by Hopper's copy engine and tensor cores (one_row.cu)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda import launch
from modelmill.ops.cuda.narrow_weights import PIECE, TYPES, shift

# Sizes of one_row.cu.
WARPS, TILE, SCALES, SUMS = 16, 16, 3, 4
THREADS = 32 * (WARPS + 1)
# Bytes of a block at most, and of its ring. More than half of what there is: two blocks of a kernel on one
# multiprocessor would leave another without work.
_ROOM, _LEAST, _MOST = 150 << 10, 120 << 10, 224 << 10
_BOX = (256, 8)  # words of a row, rows that the copy engine brings at a time
_STAGES = (12, 10, 8, 6, 5, 4, 3)


class Kind(NamedTuple):
    """What is multiplied: bits of a weight, whether x is integers, whether there are offsets, float32 scales."""

    bits: int
    integer: bool
    offset: bool
    wide: bool
    groups: int = 1  # of a piece of 128 columns


def shared(kind: Kind, columns: int, groups: int, stages: int) -> int:
    """Bytes of a block's shared memory."""
    pieces, stage = -(-columns // PIECE), TILE * WARPS * 16 * kind.bits
    used = (
        stages * stage
        + pieces * (128 if kind.integer else 256)
        + 4 * (pieces * kind.groups + groups + SUMS * WARPS * TILE)
    )
    barriers = 8 * (2 * stages + 2 * SCALES + SUMS)
    grids = SCALES * (2 if kind.offset else 1) * TILE * groups * (4 if kind.wide else 2)
    return max(_LEAST, -(-used // 16) * 16 + -(-barriers // 16) * 16 + grids)


def stages_of(kind: Kind, columns: int, groups: int) -> int | None:
    """Stages of the ring: as many as there is room for; None where not even the fewest fit."""
    fewest = _STAGES[-1] if shared(kind, columns, groups, _STAGES[-1]) <= _MOST else None
    return next((stages for stages in _STAGES if shared(kind, columns, groups, stages) <= _ROOM), fewest)


def serves(x: torch.Tensor, weight: torch.Tensor, kind: Kind, group: int, groups: int) -> bool:
    """One row, packed, at addresses of 16 bytes; rows of the weight in sixteens, of multiples of 16 bytes."""
    columns = x.shape[1]
    if x.shape[0] != 1 or weight.shape[0] % TILE or weight.shape[1] % 16 or columns % 32 or not weight.is_contiguous():
        return False
    if (
        x.data_ptr() % 16
        or weight.data_ptr() % 16
        or x.stride(1) != 1
        or shift(group, columns, PIECE // kind.groups) is None
    ):
        return False
    return stages_of(kind, columns, groups) is not None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    more: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """x [1, K] · weightᵀ → [1, N] of ``dtype``; gated: silu(first half) · second half of it, [1, N / 2].

    grids: scale and offset [N, G], columns of a group. more: step [G], constant [N], bias [N].
    """
    scale, offset, group = grids
    rows, columns = weight.shape[0], x.shape[1]
    groups = scale.numel() // rows
    kind = kind_of(x, weight, scale, offset, group)
    stages, by = stages_of(kind, columns, groups), shift(group, columns, PIECE // kind.groups)
    assert stages is not None and by is not None  # noqa: PT018  supports() has said so
    out = torch.empty((1, rows // 2 if gated else rows), dtype=dtype, device=x.device)
    device = x.get_device()
    with torch.cuda.device(x.device):
        told = macros(kind, stages, dtype, gated=gated)
        kernel = launch.kernel("one_row", "one_row", told, THREADS, shared(kind, columns, groups, stages), device)
        pointers = launch.addresses(x, scale, offset, *more, out)
        tiles = rows // TILE
        width = weight.stride(0)  # bytes
        there = launch.tensor_map(weight.data_ptr(), torch.int32, (width // 4, rows), (width,), _BOX, swizzled=False)
        work = struct.pack("=7Q6i", *pointers, rows, width, columns, groups, by, tiles)
        kernel.launch(min(tiles, launch.multiprocessors(device)), there, work, early=True)
    return out


def kind_of(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int
) -> Kind:
    """What the kernel is compiled for."""
    bits = 4 if weight.dtype is torch.uint8 else 8
    integer = x.dtype is torch.int8
    groups = PIECE // group if group in (32, 64) and bits == 4 and not integer and group < x.shape[1] else 1
    return Kind(bits, integer, offset is not None, scale.dtype is torch.float32, groups)


def macros(kind: Kind, stages: int, dtype: torch.dtype, *, gated: bool) -> tuple[str, ...]:
    """For the compiler; dtype: of the output, and of x where that is no integers."""
    sizes = {"BITS": kind.bits, "INTEGER": kind.integer, "OFFSET": kind.offset, "WIDE": kind.wide, "GATED": gated}
    sizes["GROUPS"] = kind.groups
    return (*(f"{name}={int(size)}" for name, size in sizes.items()), f"STAGES={stages}", *TYPES[dtype])
