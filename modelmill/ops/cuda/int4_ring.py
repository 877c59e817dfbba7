"""Products of 9 to 64 rows with 4-bit weights in groups of whole pieces of 128 columns (int4_ring.cu)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from modelmill.ops.cuda import launch
from modelmill.ops.cuda.int4_rows import FEWEST, box_of, busiest, share_of
from modelmill.ops.cuda.narrow_weights import PIECE, TYPES, shift

_SHARED = 222 << 10  # bytes of a block at most
_MOST_STAGES = 8
_CHUNK = 16  # groups whose sums are multiplied at once


class Form(NamedTuple):
    """How the kernel is compiled: warpgroups of a block, blocks that share K."""

    workers: int
    split: int


FORMS = (Form(2, 1), Form(2, 2), Form(2, 4), Form(3, 1), Form(3, 2), Form(3, 4))


def serves(rows: int, columns: int, group: int, *, gated: bool) -> bool:
    """Whether a weight [rows, columns] is read: no group smaller than a piece, outputs in eights."""
    return shift(group, columns) is not None and rows % (16 if gated else 8) == 0


def stage(form: Form, box: int) -> int:
    """Bytes of a piece: weights and columns of x."""
    return 64 * form.workers * 64 + box * 256


def stages_of(form: Form, box: int, share: int) -> int:
    """Pieces on their way beside the scales of ``share`` groups."""
    left = _SHARED - 64 * form.workers * (share | 1) * 4
    return min(_MOST_STAGES, left // (stage(form, box) + 16))


def shared(form: Form, box: int, share: int) -> int:
    """Bytes of a block's shared memory."""
    return stages_of(form, box, share) * (stage(form, box) + 16) + 64 * form.workers * (share | 1) * 4


def fits(form: Form, columns: int, group: int, box: int) -> bool:
    """Whether a block's scales leave room for pieces enough, and for the sums where they were."""
    pieces, by = -(-columns // PIECE), shift(group, columns)
    if by is None or (form.split > 1 and pieces < FEWEST * form.split):
        return False
    stages = stages_of(form, box, share_of(pieces, form.split, by))
    return stages >= 3 and stages * stage(form, box) >= box * (64 * form.workers + 4) * 4


def form_of(rows: int, columns: int, group: int, box: int, blocks: int) -> Form | None:
    """The form that keeps ``blocks`` multiprocessors busiest with a weight of so many rows; None where none fits."""
    return busiest([form for form in FORMS if fits(form, columns, group, box)], rows, blocks)


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
    rows, groups = weight.shape[0], scale.shape[1]
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    box, by, pieces, chunks = box_of(tokens), shift(group, columns), -(-columns // PIECE), -(-groups // _CHUNK)
    assert by is not None
    share, device = share_of(pieces, form.split, by), x.get_device()
    pitch = pieces * PIECE + chunks * 64
    ready = torch.empty((tokens, pitch), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device):
        macros = _macros(x.dtype, form, box, share, offset=offset is not None, gated=gated)
        put = launch.kernel("int4_ring", "int4_ready", macros, 256, 0, device)
        counts = (tokens, columns, x.stride(0), pitch, pieces, groups, by, chunks)
        work = struct.pack("=2Q8i", x.data_ptr(), ready.data_ptr(), *counts)
        put.launch(-(-tokens * chunks * _CHUNK // 8), work, early=True)
        high, size = 64 * form.workers, shared(form, box, share)
        kernel = launch.kernel("int4_ring", "int4_ring", macros, 2 * high + 32, size, device)
        x_map = launch.tensor_map(ready.data_ptr(), x.dtype, (pitch, tokens), (pitch * 2,), (64, box))
        wide, box_rows = weight.shape[1], high // 2 if gated else high
        w_map = launch.tensor_map(weight.data_ptr(), torch.uint8, (wide, rows), (wide,), (64, box_rows), False)
        pointers = launch.addresses(scale, offset, bias, out)
        work = struct.pack("=4Q6i", *pointers, tokens, rows, pieces, groups, by, share | 1)
        kernel.launch(form.split * -(-rows // high), x_map, w_map, work, early=True)
    return out


def _macros(dtype: torch.dtype, form: Form, box: int, share: int, *, offset: bool, gated: bool) -> tuple[str, ...]:
    sizes = {"BOX": box, "WORKERS": form.workers, "SPLIT": form.split, "STAGES": stages_of(form, box, share)}
    switches = {"GATED": int(gated), "OFFSET": int(offset)}
    return (*(f"{name}={size}" for name, size in (sizes | switches).items()), *TYPES[dtype])
