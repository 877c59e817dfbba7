"""Products of one row with 4- and 8-bit weights by Hopper's copy engine and 8-bit tensor cores (one_row.cu)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda import launch
from modelmill.ops.cuda.narrow_weights import PIECE, TYPES, shift

# Sizes of one_row.cu.
TILE, LINE = 16, 2048
_HELD = (4, 2, 1)  # tiles whose scales and sums a block holds
# Bytes of a block: at least more than half of what there is, since two blocks of a kernel on one multiprocessor would
# leave another without work. Little more where that suffices: what is left lets the small kernels between products in.
_LEAST, _ROOM, _MOST = 116 << 10, 124 << 10, 224 << 10


class Kind(NamedTuple):
    """What is multiplied: bits of a weight, whether x is integers, whether there are offsets, float32 scales."""

    bits: int
    integer: bool
    offset: bool
    wide: bool
    groups: int = 1  # of a piece of 128 columns

    @property
    def most(self) -> tuple[int, int]:
        """Warps of a block and lines that each has on its way: measured on an H200 with the shapes of 7B models."""
        return (22, 2) if self.integer else (16, 3)


class Shape(NamedTuple):
    """A product's sizes: lines of 128 bytes and groups of a row; warps, stages of their rings, tiles held."""

    lines: int
    groups: int
    warps: int
    stages: int
    held: int


def shape_of(kind: Kind, columns: int, groups: int) -> Shape | None:
    """How a row of the weight is dealt out, with as many stages as there is room for; None where two do not fit."""
    lines, (warps, most) = -(-columns * kind.bits // 8 // 128), kind.most
    for held in _HELD:
        every = [Shape(lines, groups, min(warps, lines), stages, held) for stages in range(most, 1, -1)]
        best = next((shape for shape in every if shared(kind, shape) <= _ROOM), every[-1])
        if shared(kind, best) <= _MOST:
            return best
    return None


def shared(kind: Kind, shape: Shape) -> int:
    """Bytes of a block's shared memory."""
    pieces = shape.lines * 8 // kind.bits
    planes = (8 // kind.bits) if kind.integer else 4
    sums = pieces * kind.groups if kind.bits == 4 or kind.offset else 0
    barriers = 8 * (shape.warps * shape.stages + shape.held) + 4 * shape.held
    used = shape.warps * shape.stages * LINE + _up(barriers) + 4 * shape.held * shape.warps * TILE
    used += pieces * planes * PIECE + 4 * (2 * pieces + sums)
    grids = shape.held * (2 if kind.offset else 1) * TILE * shape.groups * (4 if kind.wide else 2)
    return max(_LEAST, _up(used) + grids)


def _up(size: int) -> int:
    return -(-size // 16) * 16


def serves(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int) -> bool:
    """One row, packed, all at addresses of 16 bytes; rows of the weight in sixteens, of multiples of 16 bytes."""
    columns = x.shape[1]
    if x.shape[0] != 1 or weight.shape[0] % TILE or weight.shape[1] % 16 or columns % 32 or not weight.is_contiguous():
        return False
    if x.stride(1) != 1 or any(t is not None and t.data_ptr() % 16 for t in (x, weight, scale, offset)):
        return False
    kind, groups = kind_of(x, weight, scale, offset, group), scale.numel() // weight.shape[0]
    return shift(group, columns, PIECE // kind.groups) is not None and shape_of(kind, columns, groups) is not None


class Plan(NamedTuple):
    """A launch: how it is compiled, threads and bytes of a block, tiles, and what is packed behind the pointers."""

    macros: tuple[str, ...]
    threads: int
    shared: int
    tiles: int
    sizes: tuple[int, ...]
    gated: bool

    def weight(self, width: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Sizes, strides and box of the weight's rows of so many bytes, in words: gated, both halves come at once."""
        rows = self.sizes[0]
        if self.gated:
            return (width // 4, rows // 2, 2), (width, rows // 2 * width), (32, 8, 2)
        return (width // 4, rows), (width,), (32, 16)


def planned(kind: Kind, size: tuple[int, int], group: int, groups: int, dtype: torch.dtype, *, gated: bool) -> Plan:
    """For a weight of ``size`` rows and columns; dtype: of the output, and of x where that is no integers."""
    rows, columns = size
    shape, by = shape_of(kind, columns, groups), shift(group, columns, PIECE // kind.groups)
    assert shape is not None and by is not None  # noqa: PT018  serves() has said so
    slots = 8 // kind.bits * kind.groups  # groups of a line, where pieces do not share one
    mixed = kind.bits == 4 and kind.groups > 1
    together = slots > 1 and not mixed and not kind.wide and by == 0 and groups % slots == 0
    sizes = {"BITS": kind.bits, "INTEGER": kind.integer, "OFFSET": kind.offset, "WIDE": kind.wide, "GATED": gated}
    sizes |= {"GROUPS": kind.groups, "SINGLE": shape.lines <= shape.warps, "TOGETHER": together, "WARPS": shape.warps}
    sizes |= {"STAGES": shape.stages, "HELD": shape.held}
    macros = (*(f"{name}={int(size)}" for name, size in sizes.items()), *TYPES[dtype])
    numbers = (rows, columns, groups, by, rows // TILE, shape.lines)
    return Plan(macros, 32 * shape.warps, shared(kind, shape), rows // TILE, numbers, gated)


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
    kind = kind_of(x, weight, scale, offset, group)
    plan = planned(kind, (rows, columns), group, scale.numel() // rows, dtype, gated=gated)
    out = torch.empty((1, rows // 2 if gated else rows), dtype=dtype, device=x.device)
    device = x.get_device()
    with torch.cuda.device(x.device):
        kernel = launch.kernel("one_row", "one_row", plan.macros, plan.threads, plan.shared, device)
        pointers = launch.addresses(x, scale, offset, *more, out)
        there = launch.tensor_map(weight.data_ptr(), torch.int32, *plan.weight(weight.stride(0)))
        work = struct.pack("=7Q6i", *pointers, *plan.sizes)
        kernel.launch(min(plan.tiles, launch.multiprocessors(device)), there, work, early=True)
    return out


def kind_of(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int
) -> Kind:
    """What the kernel is compiled for."""
    bits = 4 if weight.dtype is torch.uint8 else 8
    integer = x.dtype is torch.int8
    groups = PIECE // group if group in (32, 64) and not integer and group < x.shape[1] else 1
    return Kind(bits, integer, offset is not None, scale.dtype is torch.float32, groups)
