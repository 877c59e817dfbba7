"""Argmax in two small kernels: the best token of each chunk, then the best of those.

Computes: ids[M] of logits[M, vocab]
Dtypes: float32
Layout: row-major, contiguous columns
Range: any M
Technique: two kernels: the best of each chunk, then the best of those, PDL
Ops: argmax
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.row_op_support import RowOpSupportRange
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

_SMALL_BATCH_ROWS = 6  # up to this many rows, smaller chunks are needed to use all SMs


SUPPORTED_PROBLEMS = (RowOpSupportRange(dtypes=(torch.float32,)),)


def supports(logits: torch.Tensor) -> bool:
    """Whether columns are contiguous."""
    return logits.stride(1) == 1


def run(logits: torch.Tensor) -> torch.Tensor:
    """Compute the op with the Triton kernel; same contract as the reference."""
    rows, vocab = logits.shape
    chunk = 1024 if rows <= _SMALL_BATCH_ROWS else 8192
    count = -(-vocab // chunk)
    best = torch.empty((rows, count), dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    options = pdl_launch_options(logits.device, rows)
    _chunk_argmax_kernel[(count, rows)](
        logits,
        logits.stride(0),
        vocab,
        best,
        count,
        CHUNK=chunk,
        num_warps=4 if chunk == 1024 else 8,
        **options,
    )
    _merge_chunk_argmax_kernel[(rows,)](
        best, out, count, CHUNKS=next_power_of_two(count), num_warps=1, **options
    )
    return out


@triton.jit(do_not_specialize=["vocab", "count"])
def _chunk_argmax_kernel(
    logits_ptr, stride, vocab, best_ptr, count, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Store one integer key per chunk: the value in float order in the high word, the id below.

    Lower ids give larger keys.
    """
    pdl_wait_and_trigger(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("-inf"))
    chunk_max = tl.max(x)
    index = tl.min(tl.where((x == chunk_max) & (at < vocab), at, 2147483647))
    bits = tl.where(chunk_max == 0, 0.0, chunk_max).to(tl.int32, bitcast=True)  # −0 equals 0
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    tl.store(best_ptr + row * count + chunk, key * 4294967296 + (2147483647 - index))


@triton.jit(do_not_specialize=["count"])
def _merge_chunk_argmax_kernel(best_ptr, out_ptr, count, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    pdl_wait_and_trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, CHUNKS)
    best = tl.max(
        tl.load(best_ptr + row * count + index, mask=index < count, other=-9223372036854775807)
    )
    tl.store(out_ptr + row, 2147483647 - (best & 2147483647))
