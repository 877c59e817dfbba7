"""The likeliest token in two small kernels: each chunk's best, and the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import power_of_two
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait

_SMALL_BATCH_ROWS = 6  # up to so many, smaller chunks fill the chip


def supports(logits: torch.Tensor) -> bool:
    """float32 rows with their columns side by side."""
    return logits.dtype is torch.float32 and logits.stride(1) == 1 and logits.numel() > 0


def run(logits: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    rows, vocab = logits.shape
    chunk = 1024 if rows <= _SMALL_BATCH_ROWS else 8192
    count = -(-vocab // chunk)
    best = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    how = pdl_launch_options(logits.device, rows)
    _chunk_best[(count, rows)](
        logits,
        logits.stride(0),
        vocab,
        best,
        count,
        CHUNK=chunk,
        num_warps=4 if chunk == 1024 else 8,
        **how,
    )
    _merge_best[(rows,)](best, out, count, CHUNKS=power_of_two(count), num_warps=1, **how)
    return out


@triton.jit(do_not_specialize=["vocab", "count"])
def _chunk_best(logits_ptr, stride, vocab, best_ptr, count, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One whole number a chunk: the value in the order of the floats above, the id below, lower ids
    larger.
    """
    pdl_wait(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    most = tl.max(x)
    place = tl.min(tl.where((x == most) & (at < vocab), at, 2147483647))
    bits = tl.where(most == 0, 0.0, most).to(tl.int32, bitcast=True)  # −0 equals 0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    tl.store(best_ptr + row * count + chunk, key * 4294967296 + (2147483647 - place))


@triton.jit(do_not_specialize=["count"])
def _merge_best(best_ptr, out_ptr, count, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    best = tl.max(
        tl.load(best_ptr + row * count + index, mask=index < count, other=-9223372036854775807)
    )
    tl.store(out_ptr + row, 2147483647 - (best & 2147483647))
