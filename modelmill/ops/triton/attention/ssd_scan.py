"""Mamba2's state space recurrence, with each head's state in registers (arXiv:2405.21060).

Computes: y[T, H·P] and the states [H, P, N] of decodes and prompts, with a snapshot of each
Dtypes: x, B, C bfloat16, float16 or float32; states and arithmetic float32, chunks of bfloat16 in
    products of 16 bits, of which those of a state have two terms
Layout: states by slot, read and written in place; scores [T, H, chunk] and decays [T, H] of whole
    chunks between the launches of a prompt
Range: N up to 256, any P
Technique: whole chunks of tokens by products of matrices (state space duality, section 6): what
    reads no state for all chunks at once, then a program for a sequence, a head and a block of P,
    whose state is both accumulator and operand of the tensor cores. The other tokens one by one
Ops: ssd_scan

Rows of a state are independent of each other: each block of P reads all of N. The chunks lie at
multiples of their length, and a chunk is computed alike wherever a step begins or ends, so results
do not depend on how steps divide a prompt there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from modelmill.ops.recurrent_metadata import has_contiguous_operands
from modelmill.ops.ssd_scan import SSDScanInputs
from modelmill.ops.triton.attention.recurrence_common import (
    MIN_DOT_SIZE,
    PRECISION,
    TOKENS_OF_CHUNKS,
    decay_and_add_to_state,
    decays_within_chunk,
    dot_split_mantissa,
    find_chunk_start_in_window,
    launch_tokens_and_chunks,
    load_state_and_store_snapshot,
    load_token_range,
    select_chunk_launch_config,
    softplus,
    split_mantissa,
    zero_padding_outputs,
)
from modelmill.ops.triton.common.device import (
    next_power_of_two,
    unavailable_reason_for_portable_kernel,
)

unavailable_reason = unavailable_reason_for_portable_kernel

MAX_STATE_SIZE = 256
STATE_ROWS_PER_PROGRAM = 16  # of a state in a program that computes single tokens
HEADS_PER_SCORE_PROGRAM = 8  # heads of a program that share the products of B and C


def supports(inputs: SSDScanInputs) -> bool:
    """Sizes up to the limit; rows and states that lie together."""
    state = inputs.state
    return state.shape[3] <= MAX_STATE_SIZE and has_contiguous_operands(
        inputs.xbc, inputs.dt, state
    )


def run(inputs: SSDScanInputs) -> torch.Tensor:
    """Compute the op with the Triton kernels; same contract as the reference."""
    _, heads, dim, _ = inputs.state.shape
    return launch_tokens_and_chunks(
        inputs.xbc,
        heads * dim,
        inputs.rows,
        partial(_run_tokens, inputs),
        partial(_run_chunks, inputs),
    )


def _run_tokens(inputs: SSDScanInputs, out: torch.Tensor, part: Any, chunk: int) -> None:
    """The tokens of a part of each sequence, one by one."""
    xbc, dt, a_log, dt_bias, skip, limit, state, rows = inputs
    _, heads, dim, size = state.shape
    groups = (xbc.shape[1] - heads * dim) // (2 * size)
    block_p = max(MIN_DOT_SIZE, min(STATE_ROWS_PER_PROGRAM, next_power_of_two(dim)))
    block_n = max(MIN_DOT_SIZE, next_power_of_two(size))
    _tokens_kernel[(len(rows.slots), heads, -(-dim // block_p))](
        xbc, dt, a_log, dt_bias, skip, state, out, rows.query_start, rows.positions, rows.slots,
        rows.snapshot_slots, rows.snapshot_ends, heads, groups, xbc.stride(0), state.stride(0),
        *limit, P=dim, N=size, BLOCK_P=block_p, BLOCK_N=block_n, PART=part, CHUNK=chunk,
        num_warps=max(1, min(4, block_p * block_n // 512)),
    )  # fmt: skip


def _run_chunks(inputs: SSDScanInputs, out: torch.Tensor, chunk: int) -> None:
    """The whole chunks of all sequences."""
    xbc, dt, a_log, dt_bias, skip, limit, state, rows = inputs
    _, heads, dim, size = state.shape
    tokens, groups = len(xbc), (xbc.shape[1] - heads * dim) // (2 * size)
    block_n = max(MIN_DOT_SIZE, next_power_of_two(size))
    launch = select_chunk_launch_config(xbc, dim, block_n)
    terms = 2 if launch.dtype is torch.bfloat16 else 1
    scores = torch.empty((terms, tokens, heads, chunk), dtype=launch.dtype, device=xbc.device)
    decay = torch.empty((2, tokens, heads), dtype=torch.float32, device=xbc.device)
    blocks = -(-heads // groups // HEADS_PER_SCORE_PROGRAM)
    sizes = {
        "P": dim, "N": size, "BLOCK_N": block_n, "CHUNK": chunk, "BLOCK_T": MIN_DOT_SIZE,
        "PRECISION": PRECISION,
    }  # fmt: skip
    _chunk_scores_kernel[(-(-tokens // chunk), groups * blocks)](
        xbc, dt, a_log, dt_bias, skip, scores, decay, out, rows.query_start, rows.positions,
        len(rows.slots), tokens, heads, groups, xbc.stride(0), *limit,
        HEADS=HEADS_PER_SCORE_PROGRAM, BLOCK_P=next_power_of_two(dim), **sizes,
        num_warps=launch.prepare_warps, num_stages=1,
    )  # fmt: skip
    _chunks_kernel[(len(rows.slots), heads, -(-dim // launch.rows))](
        xbc, scores, decay, state, out, rows.query_start, rows.positions, rows.slots,
        rows.snapshot_slots, rows.snapshot_ends, tokens, heads, groups, xbc.stride(0),
        state.stride(0), BLOCK_P=launch.rows, OWN_ROWS=launch.own_rows, **sizes,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


@triton.jit
def _tokens_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, skip_ptr, state_ptr, out_ptr, start_ptr, position_ptr,
    slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, heads, groups, row_stride, slot_stride, least,
    most, P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A part of a sequence's tokens one by one: BLOCK_P rows of the state of a head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, stop, first, kept = load_token_range(
        start_ptr, position_ptr, snapshot_end_ptr, sequence, PART, CHUNK
    )
    if stop > begin:
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n = tl.arange(0, BLOCK_N)
        place = head * P * N + p[:, None] * N + n[None, :]
        inside = (p < P)[:, None] & (n < N)[None, :]
        s, own, snapshot = load_state_and_store_snapshot(
            state_ptr, slot_ptr, snapshot_slot_ptr, sequence, slot_stride,
                                      place, inside, first, kept == begin)  # fmt: skip
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        skip = tl.load(skip_ptr + head).to(tl.float32)
        x_ptr, out = xbc_ptr + head * P, out_ptr + head * P
        b_ptr = xbc_ptr + heads * P + head // (heads // groups) * N
        c_ptr = b_ptr + groups * N
        for t in range(begin, stop):
            row = t * row_stride
            x = tl.load(x_ptr + row + p, mask=p < P, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + row + n, mask=n < N, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + row + n, mask=n < N, other=0.0).to(tl.float32)
            delta = softplus(tl.load(dt_ptr + t * heads + head) + bias)
            delta = tl.minimum(tl.maximum(delta, least), most)
            s = s * tl.exp(rate * delta) + (x * delta)[:, None] * b[None, :]
            y = tl.sum(s * c[None, :], 1) + skip * x
            tl.store(out + t * heads * P + p, y, mask=p < P)
            if t + 1 == kept:
                tl.store(snapshot, s, mask=inside)
        tl.store(own, s, mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _chunk_scores_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, skip_ptr, scores_ptr, decay_ptr, out_ptr, start_ptr,
    position_ptr, sequences, tokens, heads, groups, row_stride, least, most, P: tl.constexpr,
    N: tl.constexpr, HEADS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the chunk that starts in a window, for some heads of a group.

    Writes C Bᵀ ⊙ decays · Δ + D I, decays since the start, and Δ · decays to the end; zeros into
    the outputs of padding.
    """
    window = tl.program_id(0).to(tl.int64) * CHUNK
    shared = heads // groups  # heads of a group
    blocks = tl.cdiv(shared, HEADS)
    group = tl.program_id(1) // blocks
    head = group * shared + tl.program_id(1) % blocks * HEADS
    last_head = tl.minimum(head + HEADS, (group + 1) * shared)
    zero_padding_outputs(
        out_ptr, start_ptr, window, sequences, tokens, heads, head, last_head, P, BLOCK_P,
                 CHUNK, BLOCK_T)  # fmt: skip
    base = find_chunk_start_in_window(start_ptr, position_ptr, window, sequences, CHUNK)
    if base >= 0:
        i, n = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N)
        row, valid = base + i, i < CHUNK
        b_ptr = xbc_ptr + heads * P + group * N
        at = row[:, None] * row_stride + n[None, :]
        mask = valid[:, None] & (n < N)[None, :]
        dtype = scores_ptr.dtype.element_ty
        b = tl.load(b_ptr + at, mask=mask, other=0.0).to(dtype)
        c = tl.load(b_ptr + groups * N + at, mask=mask, other=0.0).to(dtype)
        products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        square = valid[:, None] & valid[None, :]
        for each in range(head, last_head):
            rate = -tl.exp(tl.load(a_log_ptr + each).to(tl.float32))
            bias = tl.load(dt_bias_ptr + each).to(tl.float32)
            skip = tl.load(skip_ptr + each).to(tl.float32)
            step = tl.load(dt_ptr + row * heads + each, mask=valid, other=0.0) + bias
            delta = tl.minimum(tl.maximum(softplus(step), least), most)
            delta = tl.where(valid, delta, 0.0)
            between, since_start, to_end, _ = decays_within_chunk(rate * delta, CHUNK, BLOCK_T)
            scores = products * between * delta[None, :]
            scores += tl.where(i[:, None] == i[None, :], skip, 0.0)
            place = row * heads + each
            target = scores_ptr + place[:, None] * CHUNK + i[None, :]
            if dtype == tl.bfloat16:
                high, low = split_mantissa(scores)
                tl.store(target, high, mask=square)
                tl.store(target + tokens.to(tl.int64) * heads * CHUNK, low, mask=square)
            else:
                tl.store(target, scores, mask=square)
            tl.store(decay_ptr + place, since_start, mask=valid)
            tl.store(decay_ptr + tokens * heads + place, delta * to_end, mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def _chunks_kernel(
    xbc_ptr, scores_ptr, decay_ptr, state_ptr, out_ptr, start_ptr, position_ptr, slot_ptr,
    snapshot_slot_ptr, snapshot_end_ptr, tokens, heads, groups, row_stride, slot_stride,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, OWN_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The whole chunks of a sequence: BLOCK_P rows of the state of a head.

    Outputs are computed transposed, [BLOCK_P, tokens]: so the state is a left operand as it lies in
    the registers of the accumulator.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, stop, first, kept = load_token_range(
        start_ptr, position_ptr, snapshot_end_ptr, sequence, TOKENS_OF_CHUNKS, CHUNK
    )
    if stop > begin:
        p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
        n, i = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_T)
        place = head * P * N + p[:, None] * N + n[None, :]
        inside = (p < P)[:, None] & (n < N)[None, :]
        s, own, snapshot = load_state_and_store_snapshot(
            state_ptr, slot_ptr, snapshot_slot_ptr, sequence, slot_stride,
                                      place, inside, first, kept == begin)  # fmt: skip
        valid = i < CHUNK
        mask_p = valid[:, None] & (p < P)[None, :]
        mask_n = valid[:, None] & (n < N)[None, :]
        square = valid[:, None] & valid[None, :]
        dtype = scores_ptr.dtype.element_ty
        decay_ptr += head
        weight_ptr = decay_ptr + tokens * heads
        low_ptr = scores_ptr + tokens.to(tl.int64) * heads * CHUNK
        eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dtype)
        whole = tl.load(decay_ptr + (begin + CHUNK - 1) * heads)
        for base in range(begin, stop, CHUNK):
            row = base + i
            # a chunk ahead: the pipeline has tensors only
            ahead = tl.minimum(base + 2 * CHUNK, stop) - 1
            next_whole = tl.load(decay_ptr + ahead * heads)
            since_start = tl.load(decay_ptr + row * heads, mask=valid, other=0.0)
            weight = tl.load(weight_ptr + row * heads, mask=valid, other=0.0)
            x_ptr = xbc_ptr + row[:, None] * row_stride
            b_ptr = x_ptr + heads * P + head // (heads // groups) * N + n[None, :]
            x = tl.load(x_ptr + head * P + p[None, :], mask=mask_p, other=0.0).to(dtype)
            b = tl.load(b_ptr, mask=mask_n, other=0.0).to(dtype)
            c = tl.load(b_ptr + groups * N, mask=mask_n, other=0.0).to(dtype)
            at = (row[:, None] * heads + head) * CHUNK + i[None, :]
            scores = tl.load(scores_ptr + at, mask=square, other=0.0)
            x = tl.trans(x)
            y = tl.dot(s.to(dtype), tl.trans(c), input_precision=PRECISION)
            # The last product of a chunk in the program's text decides whether the warps divide
            # rows or columns of all.
            if OWN_ROWS:  # x as an accumulator, which becomes a left operand
                added = tl.dot(x, eye) * weight[None, :]
                added = dot_split_mantissa(added, b, PRECISION, ONE_SUM=True)
            y *= since_start[None, :]
            if dtype == tl.bfloat16:
                low = tl.load(low_ptr + at, mask=square, other=0.0)
                y = tl.dot(x, tl.trans(low), y)
            y = tl.dot(x, tl.trans(scores), y, input_precision=PRECISION)
            out = out_ptr + row[None, :] * heads * P + head * P + p[:, None]
            tl.store(out, y, mask=valid[None, :] & (p < P)[:, None])
            if not OWN_ROWS:
                added = x.to(tl.float32) * weight[None, :]
                added = dot_split_mantissa(added, b, PRECISION, ONE_SUM=True)
            s = decay_and_add_to_state(s, whole, added)
            if base + CHUNK == kept:
                tl.store(snapshot, s, mask=inside)
            whole = next_whole
        tl.store(own, s, mask=inside)
