"""Products of up to 64 rows with 8-bit weights, a scale for each group or row, on tensor cores.

Of one row they are one_row.cu's, of more or with large weights narrow_ring.cu's; the rest int8_groups.cu serves.
"""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda import launch, narrow_ring, one_row
from modelmill.ops.cuda.int4_rows import box_of
from modelmill.ops.cuda.narrow_weights import PIECE, RUN, THREADS, TYPES, Form, fits, piece_of, shift

# rows of x up to … → how the kernel is compiled: with many rows a block takes more of N, as x is read by each
FORMS = ((8, Form(1, 1, 2, 3)), (16, Form(2, 1, 2, 2)), (32, Form(4, 2, 2, 1)), (64, Form(8, 4, 1, 1)))
MOST = FORMS[-1][0]
# rows, or weights: more of either go through shared memory (narrow_ring), where the weight's sizes let them
FEW, LARGE = 8, 1 << 25
_MOST_COLUMNS = {8: 64}  # of a piece, by tiles of x: for more there are too few registers


def form_of(tokens: int) -> Form:
    """How the kernel for so many rows of x is compiled."""
    return next(form for most, form in FORMS if tokens <= most)


def piece_for(tokens: int, group: int, columns: int) -> int:
    """Columns that a warp takes at a time."""
    return min(piece_of(group, columns), _MOST_COLUMNS.get(form_of(tokens).tiles, PIECE))


def serves(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    bias: torch.Tensor | None = None,
) -> bool:
    """Up to 64 rows in 16 bits, K a multiple of 32, groups of 32, 64, 128, 256 … columns or of all; all packed."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MOST or x.dtype.itemsize != 2 or not x.is_cuda:
        return False
    scale, offset, group = grids
    packed = all(t is None or t.is_contiguous() for t in (weight, scale, offset, bias))
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    alike = scale.dtype in (torch.float16, torch.float32) and (offset is None or offset.dtype == scale.dtype)
    columns = x.shape[1]
    runs = columns % RUN == 0 and (group % RUN == 0 or group >= columns)
    whole = runs and shift(group, columns, piece_of(group, columns)) is not None
    if not (packed and aligned and alike and whole) or (bias is not None and bias.dtype != x.dtype):
        return False
    return fits(form_of(x.shape[0]), scale.numel() // weight.shape[0]) or _ring(x, weight, grids) is not None


def _ring(
    x: torch.Tensor, weight: torch.Tensor, grids: tuple[torch.Tensor, torch.Tensor | None, int], *, gated: bool = False
) -> narrow_ring.Form | None:
    """How narrow_ring is compiled for these, where it is what serves them."""
    tokens, columns = x.shape
    kind = narrow_ring.kind_of(weight, *grids, columns)
    if (tokens <= FEW and weight.numel() < LARGE) or not narrow_ring.serves(weight.shape[0], kind, gated=gated):
        return None
    return narrow_ring.form_of(weight.shape[0], kind, box_of(tokens), launch.multiprocessors(x.get_device()))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor | None, int],
    bias: torch.Tensor | None,
    *,
    gated: bool,
) -> torch.Tensor:
    """x [T, K] · weightᵀ → [T, N]; gated: silu(first half) · second half of it, [T, N / 2].

    grids: scale and offset [N, G], columns of a group.
    """
    scale, offset, group = grids
    tokens, columns = x.shape
    rows = weight.shape[0]
    groups = scale.numel() // rows
    if one_row.serves(x, weight, scale, offset, group):
        return one_row.product(x, weight, grids, (None, None, bias), x.dtype, gated=gated)
    ring = _ring(x, weight, grids, gated=gated)
    if ring is not None:
        return narrow_ring.product(x, weight, *grids, bias, ring, gated=gated)
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    few, piece = form_of(tokens), piece_for(tokens, group, columns)
    with torch.cuda.device(x.device):
        wide = scale.dtype is torch.float32
        macros = macros_of(x.dtype, few, piece, offset=offset is not None, wide=wide, gated=gated)
        kernel = launch.kernel("int8_groups", "int8_groups", macros, THREADS, few.shared(groups), x.get_device())
        pointers = launch.addresses(x, weight, scale, offset, bias, out)
        counts = (tokens, rows, columns, x.stride(0), groups, shift(group, columns, piece))
        kernel.launch(few.grid(rows, gated=gated), struct.pack("=6Q6i", *pointers, *counts), early=True)
    return out


def macros_of(dtype: torch.dtype, form: Form, piece: int, *, offset: bool, wide: bool, gated: bool) -> tuple[str, ...]:
    """How the source is compiled; smaller pieces are on their way in larger numbers, so that as many bytes are."""
    form = form._replace(depth=form.depth * PIECE // piece)
    switches = {"OFFSET": offset, "WIDE": wide, "GATED": gated}
    return (*form.macros, f"PIECE={piece}", *(f"{name}={int(on)}" for name, on in switches.items()), *TYPES[dtype])
