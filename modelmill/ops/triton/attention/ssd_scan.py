"""Mamba2's state space recurrence, with each head's state in registers (arXiv:2405.21060).

Computes: y[T, H·P] and the states [H, P, N] of decodes and prompts, with a snapshot of each
Dtypes: x, B, C bfloat16, float16 or float32; states and arithmetic float32
Layout: states by slot, read and written in place
Range: N up to 256, any P
Technique: one launch; a program for a sequence, a head and a block of P. Whole chunks of tokens by
    products of matrices (state space duality, section 6) on tensor cores, the others one by one
Ops: ssd_scan

Rows of a state are independent of each other: each block of P reads all of N. The chunks lie at
multiples of their length, so results do not depend on how steps divide a prompt there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.ssd_scan import SSDScanInputs
from modelmill.ops.state_rows import has_packed_operands
from modelmill.ops.triton.attention.recurrence import (
    MIN_DOT,
    PRECISION,
    add_to_state,
    decays,
    kernel_chunk,
    open_state,
    softplus,
    stages,
    whole_chunks,
)
from modelmill.ops.triton.common.device import available_on_any_gpu, power_of_two

available = available_on_any_gpu

MAX_STATE_SIZE = 256
DECODE_ROWS, PROMPT_ROWS = 16, 32  # rows of a state in a program


def supports(inputs: SSDScanInputs) -> bool:
    """Sizes up to the limit; rows and states that lie together."""
    state = inputs.state
    return state.shape[3] <= MAX_STATE_SIZE and has_packed_operands(inputs.xbc, inputs.dt, state)


def run(inputs: SSDScanInputs) -> torch.Tensor:
    """Compute the op with the Triton kernel; same contract as the reference."""
    xbc, dt, a_log, dt_bias, skip, limit, state, rows = inputs
    _, heads, dim, size = state.shape
    groups = (xbc.shape[1] - heads * dim) // (2 * size)
    chunk = kernel_chunk(rows.chunk, decode=rows.is_decode)
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make((len(xbc), heads * dim), dtype=torch.float32, device=xbc.device)
    block_p = min(DECODE_ROWS if rows.is_decode else PROMPT_ROWS, power_of_two(dim))
    block_p, block_n = max(MIN_DOT, block_p), max(MIN_DOT, power_of_two(size))
    _ssd_scan_kernel[(len(rows.slots), heads, -(-dim // block_p))](
        xbc, dt, a_log, dt_bias, skip, state, out, rows.query_start, rows.positions, rows.slots,
        rows.snapshot_slots, rows.snapshot_ends, heads, groups, xbc.stride(0), state.stride(0),
        *limit, P=dim, N=size, BLOCK_P=block_p, BLOCK_N=block_n, CHUNK=chunk,
        BLOCK_T=max(MIN_DOT, chunk), PRECISION=PRECISION,
        num_warps=max(1, min(4, block_p * block_n // 512)), num_stages=stages(block_n),
    )  # fmt: skip
    return out


@triton.jit
def _ssd_scan_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, skip_ptr, state_ptr, out_ptr, start_ptr, position_ptr,
    slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, heads, groups, row_stride, slot_stride, least,
    most, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(start_ptr + sequence).to(tl.int64)
    stop = tl.load(start_ptr + sequence + 1).to(tl.int64)
    if stop > start:
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tl.arange(0, BLOCK_N)
        place = head * P * N + p[:, None] * N + n[None, :]
        inside = (p < P)[:, None] & (n < N)[None, :]
        first = tl.load(position_ptr + start)
        s, own, snapshot, end = open_state(
            state_ptr, slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, sequence, first, slot_stride,
            place, inside,
        )  # fmt: skip
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        skip = tl.load(skip_ptr + head).to(tl.float32)
        x_ptr, out = xbc_ptr + head * P, out_ptr + head * P
        b_ptr = xbc_ptr + heads * P + head // (heads // groups) * N
        c_ptr = b_ptr + groups * N
        kept = end - first + start
        t = start
        if CHUNK > 0:
            t, last = whole_chunks(start, stop, first, end, CHUNK)
            s = _tokens(s, start, t, kept, snapshot, inside, x_ptr, b_ptr, c_ptr, dt_ptr + head,
                        out, row_stride, heads, rate, bias, skip, least, most, p, n, P,
                        N)  # fmt: skip
            i = tl.arange(0, BLOCK_T)
            valid = i < CHUNK
            for base in range(t, last, CHUNK):
                row = base + i
                step = tl.load(dt_ptr + row * heads + head, mask=valid, other=0.0) + bias
                delta = tl.minimum(tl.maximum(softplus(step), least), most)
                delta = tl.where(valid, delta, 0.0)
                between, since_start, to_end, whole = decays(rate * delta, CHUNK, BLOCK_T)
                mask_p = valid[:, None] & (p < P)[None, :]
                mask_n = valid[:, None] & (n < N)[None, :]
                at = row[:, None] * row_stride
                x = tl.load(x_ptr + at + p[None, :], mask=mask_p, other=0.0).to(tl.float32)
                b = tl.load(b_ptr + at + n[None, :], mask=mask_n, other=0.0).to(tl.float32)
                c = tl.load(c_ptr + at + n[None, :], mask=mask_n, other=0.0).to(tl.float32)
                write = x * delta[:, None]
                scores = tl.dot(c, tl.trans(b), input_precision=PRECISION) * between
                y = tl.dot(c * since_start[:, None], tl.trans(s), input_precision=PRECISION)
                y = tl.dot(scores, write, y, input_precision=PRECISION)
                tl.store(out + row[:, None] * heads * P + p[None, :], y + skip * x, mask=mask_p)
                added = tl.dot(tl.trans(write * to_end[:, None]), b, input_precision=PRECISION)
                s = add_to_state(s, whole, added)
                if base + CHUNK == kept:
                    tl.store(snapshot, s, mask=inside)
            t = last
        s = _tokens(s, t, stop, kept, snapshot, inside, x_ptr, b_ptr, c_ptr, dt_ptr + head, out,
                    row_stride, heads, rate, bias, skip, least, most, p, n, P, N)  # fmt: skip
        tl.store(own, s, mask=inside)


@triton.jit
def _tokens(
    s, start, stop, kept, snapshot, inside, x_ptr, b_ptr, c_ptr, dt_ptr, out_ptr, row_stride, heads,
    rate, bias, skip, least, most, p, n, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The tokens [start, stop) one by one; returns the state behind them."""
    for t in range(start, stop):
        row = t * row_stride
        x = tl.load(x_ptr + row + p, mask=p < P, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row + n, mask=n < N, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + row + n, mask=n < N, other=0.0).to(tl.float32)
        delta = softplus(tl.load(dt_ptr + t * heads) + bias)
        delta = tl.minimum(tl.maximum(delta, least), most)
        s = s * tl.exp(rate * delta) + (x * delta)[:, None] * b[None, :]
        y = tl.sum(s * c[None, :], 1) + skip * x
        tl.store(out_ptr + t * heads * P + p, y, mask=p < P)
        if t + 1 == kept:
            tl.store(snapshot, s, mask=inside)
    return s
