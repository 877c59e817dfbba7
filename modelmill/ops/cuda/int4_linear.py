"""Products of a few rows with 4-bit weights through the tensor cores (int4_linear.cu)."""

from __future__ import annotations

import struct

import torch

from modelmill.core.errors import MissingDependency
from modelmill.ops.cuda import build, launch

TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
# Sizes of int4_linear.cu.
PIECE, RUN, THREADS = 128, 32, 256
# rows of x up to … → tiles of 8 of them, warps along N: with many rows a block takes more of N, as x is read by each
TILES = ((8, 1, 1), (16, 2, 1), (32, 4, 2), (64, 8, 4))
MOST = TILES[-1][0]


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    reason = build.available(kind)
    if reason is None:
        try:
            build.compiled("int4_linear", _macros(torch.bfloat16, 1, 1, offset=True))
        except MissingDependency as problem:
            reason = str(problem)
    return reason


def supports(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> bool:
    """Up to 64 rows in 16 bits, K a multiple of 32, groups of 128, 256, 512 … columns or of all, float16 scales."""
    if x.dim() != 2 or not 0 < x.shape[0] <= MOST or x.dtype not in TYPES or not x.is_cuda:
        return False
    grids = [t for t in (scale, offset) if t is not None]
    packed = all(t.dtype == torch.float16 and t.is_contiguous() for t in grids) and weight.is_contiguous()
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    biased = bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    return packed and aligned and biased and _shift(group, x.shape[1]) is not None and x.shape[1] % RUN == 0


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; sums in float32."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    _, tiles, wide = next(each for each in TILES if tokens <= each[0])
    with torch.cuda.device(x.device):
        macros = _macros(x.dtype, tiles, wide, offset=offset is not None)
        kernel = launch.kernel("int4_linear", "int4_linear", macros, THREADS, 0, x.get_device())
        tensors = (x, weight, scale, offset, bias, out)
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        strides = (x.stride(0), scale.shape[1], rows, _shift(group, columns))
        work = struct.pack("=6Q7i", *pointers, tokens, rows, columns // RUN, *strides)
        kernel.launch(-(-rows // (16 * wide)), work, early=True)
    return out


def _macros(dtype: torch.dtype, tiles: int, wide: int, *, offset: bool) -> tuple[str, ...]:
    return (f"NT={tiles}", f"RW={wide}", f"OFFSET={int(offset)}", *TYPES[dtype])


def _shift(group: int, columns: int) -> int | None:
    """How many pieces share a scale, as a power of two; None where it is none."""
    if group >= columns:
        return 30
    pieces = group // PIECE
    return pieces.bit_length() - 1 if group % PIECE == 0 and pieces & (pieces - 1) == 0 else None
