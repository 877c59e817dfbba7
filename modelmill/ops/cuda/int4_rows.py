"""Products of 9 to 64 rows with 4-bit weights by Hopper's copy engine and tensor cores (int4_rows.cu)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeVar

import torch

from modelmill.ops.cuda import launch
from modelmill.ops.cuda.narrow_weights import PIECE, RUN, TYPES, shift

MOST = 64
_SHARED = 220 << 10  # bytes of a block at most
FEWEST = 4  # pieces of K that a block of a cluster is worth


class Divided(Protocol):
    """What a form is judged by: warpgroups of 64 rows of the weight a block, blocks that share K."""

    @property
    def workers(self) -> int: ...
    @property
    def split(self) -> int: ...


Cut = TypeVar("Cut", bound=Divided)


class Form(NamedTuple):
    """How the kernel is compiled: warpgroups of a block, blocks that share K, pieces of weights on their way, stages of
    x."""

    workers: int
    split: int
    depth: int
    stages: int


FORMS = tuple(Form(*each, 4) for each in ((2, 1, 4), (2, 2, 4), (2, 4, 4), (3, 1, 2), (3, 2, 2), (3, 4, 2)))


def box_of(tokens: int) -> int:
    """Rows of x that the kernel is compiled for."""
    return 32 if tokens <= 32 else 64


def share_of(pieces: int, split: int, by: int) -> int:
    """Groups of which a block of a cluster has at most something; by: pieces of a group, as a power of two."""
    each = -(-pieces // split)
    ends = [(begin, min(begin + each, pieces)) for begin in range(0, pieces, each)]
    return max(((end - 1) >> by) - (begin >> by) + 1 for begin, end in ends)


def shared(form: Form, box: int, share: int) -> int:
    """Bytes of a block's shared memory."""
    rows = 64 * form.workers
    return form.stages * box * 256 + share * box * 4 + rows * (share + 1) * 8 + 16 * form.stages


def form_of(rows: int, columns: int, group: int, box: int, blocks: int) -> Form | None:
    """The form that keeps ``blocks`` multiprocessors busiest with a weight of so many rows; None where none fits."""
    pieces, by = -(-columns // PIECE), shift(group, columns)
    if by is None:
        return None
    fitting = [
        form
        for form in FORMS
        if (form.split == 1 or pieces >= FEWEST * form.split)
        and shared(form, box, share_of(pieces, form.split, by)) <= _SHARED
        and form.stages * box * 256 >= box * (64 * form.workers + 4) * 4
    ]
    return busiest(fitting, rows, blocks)


def busiest(forms: Iterable[Cut], rows: int, blocks: int) -> Cut | None:
    """The form that keeps ``blocks`` multiprocessors busiest with a weight of so many rows; None of none."""

    def cost(form: Cut) -> tuple[float, int]:
        # clusters of four do not fill every group of multiprocessors
        places = blocks if form.split <= 2 else blocks * 9 // 10
        waves = -(-(-(-rows // (64 * form.workers)) * form.split) // places)
        return waves * form.workers / form.split, waves

    return min(forms, key=cost, default=None)


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
    box, by = box_of(tokens), shift(group, columns)
    assert by is not None
    sums = torch.empty((groups, box), dtype=torch.float32, device=x.device)
    share, device = share_of(-(-columns // PIECE), form.split, by), x.get_device()
    with torch.cuda.device(x.device):
        macros = _macros(x.dtype, form, box, offset=offset is not None, gated=gated)
        add = launch.kernel("int4_rows", "group_sums", macros, 256, 0, device)
        counts = (tokens, columns, x.stride(0), groups, group)
        add.launch(-(-groups * box // 8), struct.pack("=2Q5i4x", x.data_ptr(), sums.data_ptr(), *counts), early=True)
        threads, size = 128 * form.workers + 32, shared(form, box, share)
        kernel = launch.kernel("int4_rows", "int4_rows", macros, threads, size, device)
        strides = (x.stride(0) * x.element_size(),)
        x_map = launch.tensor_map(x.data_ptr(), x.dtype, (columns, tokens), strides, (64, box))
        pointers = launch.addresses(weight, scale, offset, sums, bias, out)
        work = struct.pack("=6Q6i", *pointers, tokens, rows, columns // RUN, groups, by, share)
        kernel.launch(form.split * -(-rows // (64 * form.workers)), x_map, work, early=True)
    return out


def _macros(dtype: torch.dtype, form: Form, box: int, *, offset: bool, gated: bool) -> tuple[str, ...]:
    sizes = {"BOX": box, "WORKERS": form.workers, "SPLIT": form.split, "DEPTH": form.depth, "STAGES": form.stages}
    switches = {"GATED": int(gated), "OFFSET": int(offset)}
    return (*(f"{name}={size}" for name, size in (sizes | switches).items()), *TYPES[dtype])
