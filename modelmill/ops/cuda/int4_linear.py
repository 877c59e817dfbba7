"""Products of a few rows with 4-bit weights through the tensor cores (int4_linear.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda import build, int4_rows, launch, narrow_ring, one_row
from modelmill.ops.cuda.narrow_weights import PIECE, RUN, THREADS, TYPES, Form, fits, piece_of, shift

# rows of x up to … → how the kernel is compiled: with many rows a block takes more of N, as x is read by each
FORMS = ((8, Form(1, 1, 2, 3)), (16, Form(2, 1, 2, 2)), (32, Form(4, 2, 2, 1)), (64, Form(8, 4, 1, 1)))
MOST = FORMS[-1][0]
FEW = 8  # rows; more of them go through shared memory (narrow_ring, int4_rows)


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    common = _macros(torch.bfloat16, form_of(1), PIECE, offset=True, gated=False)
    return build.serves(kind, "int4_linear", common)


def form_of(tokens: int) -> Form:
    """How the kernel for so many rows of x is compiled."""
    return next(form for most, form in FORMS if tokens <= most)


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> bool:
    """Up to 64 rows in 16 bits, K a multiple of 32, groups of 32, 64, 128, 256 … columns or of all, float16 scales."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MOST or x.dtype.itemsize != 2 or not x.is_cuda:
        return False
    grids = [t for t in (scale, offset) if t is not None]
    packed = all(t.dtype == torch.float16 and t.is_contiguous() for t in grids) and weight.is_contiguous()
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    biased = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    columns = x.shape[1]
    whole = shift(group, columns, piece_of(group, columns)) is not None and columns % RUN == 0
    return packed and aligned and biased and whole and fits(form_of(x.shape[0]), scale.shape[1])


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    return product(x, weight, scale, offset, group, bias, gated=False)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    *,
    gated: bool,
) -> torch.Tensor:
    """The output [T, N]; gated: silu(first half) · second half of it, [T, N / 2]."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    if one_row.serves(x, weight, scale, offset, group):
        return one_row.product(x, weight, (scale, offset, group), (None, None, bias), x.dtype, gated=gated)
    if tokens > FEW:
        box, blocks = int4_rows.box_of(tokens), launch.multiprocessors(x.get_device())
        kind = narrow_ring.kind_of(weight, scale, offset, group, columns)
        ring = narrow_ring.form_of(rows, kind, box, blocks) if narrow_ring.serves(rows, kind, gated=gated) else None
        if ring is not None:
            return narrow_ring.product(x, weight, scale, offset, group, bias, ring, gated=gated)
        many = int4_rows.form_of(rows, columns, group, box, blocks)
        if many is not None:
            return int4_rows.product(x, weight, scale, offset, group, bias, many, gated=gated)
    out = torch.empty((tokens, rows // 2 if gated else rows), dtype=x.dtype, device=x.device)
    form, piece = form_of(tokens), piece_of(group, columns)
    groups = scale.shape[1]
    with torch.cuda.device(x.device):
        macros = _macros(x.dtype, form, piece, offset=offset is not None, gated=gated)
        kernel = launch.kernel("int4_linear", "int4_linear", macros, THREADS, form.shared(groups), x.get_device())
        pointers = launch.addresses(x, weight, scale, offset, bias, out)
        counts = (tokens, rows, columns // RUN, x.stride(0), groups, shift(group, columns, piece))
        kernel.launch(form.grid(rows, gated=gated), struct.pack("=6Q6i", *pointers, *counts), early=True)
    return out


def _macros(dtype: torch.dtype, form: Form, piece: int, *, offset: bool, gated: bool) -> tuple[str, ...]:
    if piece < PIECE and form.tiles <= 2:  # as many bytes are on their way
        form = form._replace(depth=2 * form.depth)
    switches = (f"PIECE={piece}", f"OFFSET={int(offset)}", f"GATED={int(gated)}", "WIDE=0")
    return (*form.macros, *switches, *TYPES[dtype])
