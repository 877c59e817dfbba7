"""Products of 9 to 64 rows with 4- and 8-bit weights, of fewer with large ones, through shared memory
(narrow_ring.cu)."""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda import launch
from modelmill.ops.cuda.int4_rows import FEWEST, box_of, busiest, share_of
from modelmill.ops.cuda.narrow_weights import PIECE, TYPES, piece_of, shift

_SHARED = 222 << 10  # bytes of a block at most
_MOST_STAGES = 8
_CHUNK = 16  # groups whose sums are multiplied at once


class Kind(NamedTuple):
    """What a weight is: its bits and columns, those that share a scale (or as many as there are), whether there are
    offsets and float32 scales."""

    bits: int
    columns: int
    group: int
    offset: bool
    wide: bool = False

    @property
    def pieces(self) -> int:
        """Of 128 columns."""
        return -(-self.columns // PIECE)

    @property
    def by(self) -> int | None:
        """Pieces that share a scale, as a power of two; None where that is none."""
        return shift(self.group, self.columns, PIECE // self.groups)

    @property
    def groups(self) -> int:
        """Of a piece: several only of 8-bit weights."""
        return PIECE // piece_of(self.group, self.columns) if self.bits == 8 else 1

    @property
    def sums(self) -> bool:
        """Whether what is added to each weight asks for sums of x."""
        return self.bits == 4 or self.offset

    def share(self, split: int) -> int:
        """Groups of which one of ``split`` blocks that share K has at most something."""
        if self.groups > 1:
            return -(-self.pieces // split) * self.groups
        return share_of(self.pieces, split, self.by or 0)


class Form(NamedTuple):
    """How the kernel is compiled: warpgroups of a block, blocks that share K."""

    workers: int
    split: int


FORMS = (Form(2, 1), Form(2, 2), Form(2, 4), Form(3, 1), Form(3, 2), Form(3, 4))


def kind_of(weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, group: int, columns: int) -> Kind:
    """Of a weight as the ops are given it."""
    return Kind(
        4 if weight.dtype is torch.uint8 else 8, columns, group, offset is not None, scale.dtype is torch.float32
    )


def serves(rows: int, kind: Kind, *, gated: bool) -> bool:
    """Whether such a weight of so many rows is read: no group smaller than can be told apart, outputs in eights, no
    float32 scales where sums of x are asked for."""
    return kind.by is not None and rows % (16 if gated else 8) == 0 and not (kind.wide and kind.sums)


def stage(form: Form, kind: Kind, box: int) -> int:
    """Bytes of a piece: weights and columns of x."""
    return 64 * form.workers * PIECE * kind.bits // 8 + box * 256


def _grids(form: Form, kind: Kind) -> int:
    return 64 * form.workers * (kind.share(form.split) | 1) * (4 if kind.offset or kind.wide else 2)


def stages_of(form: Form, kind: Kind, box: int) -> int:
    """Pieces on their way beside the scales of a block's groups."""
    left = _SHARED - _grids(form, kind)
    return min(_MOST_STAGES, left // (stage(form, kind, box) + 16))


def shared(form: Form, kind: Kind, box: int) -> int:
    """Bytes of a block's shared memory."""
    return stages_of(form, kind, box) * (stage(form, kind, box) + 16) + _grids(form, kind)


def fits(form: Form, kind: Kind, box: int) -> bool:
    """Whether a block's scales leave room for pieces enough, and for the sums where they were."""
    if kind.by is None or (form.split > 1 and kind.pieces < FEWEST * form.split):
        return False
    stages = stages_of(form, kind, box)
    return stages >= 3 and stages * stage(form, kind, box) >= box * (64 * form.workers + 4) * 4


@functools.lru_cache(1024)  # asked at each launch
def form_of(rows: int, kind: Kind, box: int, blocks: int) -> Form | None:
    """The form that keeps ``blocks`` multiprocessors busiest with a weight of so many rows; None where none fits."""
    return busiest([form for form in FORMS if fits(form, kind, box)], rows, blocks)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    form: Form,
    *,
    gated: bool,
) -> torch.Tensor:
    """x [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    tokens, columns = x.shape
    rows, kind = weight.shape[0], kind_of(weight, scale, offset, group, columns)
    groups, pieces, box = scale.numel() // rows, kind.pieces, box_of(tokens)
    assert kind.by is not None
    by, chunks = (kind.by if kind.groups == 1 else 0), (-(-groups // _CHUNK) if kind.sums else 0)
    # warps that bring a row of x: one for each group whose sum is asked for, or for each piece
    units = max(pieces, chunks * _CHUNK // kind.groups) if kind.groups > 1 or not kind.sums else chunks * _CHUNK
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    pitch = pieces * PIECE + chunks * 64
    ready = torch.empty((tokens, pitch), dtype=x.dtype, device=x.device)
    device = x.get_device()
    with torch.cuda.device(x.device):
        macros = macros_of(x.dtype, form, kind, box, gated=gated)
        put = launch.kernel("narrow_ring", "narrow_ready", macros, 256, 0, device)
        counts = (tokens, columns, x.stride(0), pitch, pieces, groups, by, units)
        work = struct.pack("=2Q8i", x.data_ptr(), ready.data_ptr(), *counts)
        put.launch(-(-tokens * units // 8), work, early=True)
        high, size = 64 * form.workers, shared(form, kind, box)
        kernel = launch.kernel("narrow_ring", "narrow_ring", macros, 2 * high + 32, size, device)
        x_map = launch.tensor_map(ready.data_ptr(), x.dtype, (pitch, tokens), (pitch * 2,), (64, box))
        wide, part = weight.shape[1], (32 if kind.groups == 4 else 64, high // 2 if gated else high)
        w_map = launch.tensor_map(weight.data_ptr(), weight.dtype, (wide, rows), (wide,), part, False)
        pointers = launch.addresses(scale, offset, bias, out)
        work = struct.pack("=4Q6i", *pointers, tokens, rows, pieces, groups, by, kind.share(form.split) | 1)
        kernel.launch(form.split * -(-rows // high), x_map, w_map, work, early=True)
    return out


@functools.lru_cache(1024)
def macros_of(dtype: torch.dtype, form: Form, kind: Kind, box: int, *, gated: bool) -> tuple[str, ...]:
    """How the source is compiled."""
    sizes = {"BITS": kind.bits, "GROUPS": kind.groups, "BOX": box, "WORKERS": form.workers, "SPLIT": form.split}
    sizes |= {"STAGES": stages_of(form, kind, box), "GATED": gated, "OFFSET": kind.offset, "WIDE": kind.wide}
    return (*(f"{name}={int(size)}" for name, size in sizes.items()), *TYPES[dtype])
