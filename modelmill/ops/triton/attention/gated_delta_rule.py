"""The gated delta rule, with each head's state in registers (arXiv:2412.06464).

Computes: o[T, H·dv] and the states [H, dk, dv] of decodes and prompts, with a snapshot of each
Dtypes: q, k, v bfloat16, float16 or float32; states and arithmetic float32, chunks of bfloat16 in
    products of 16 bits, of which those of a state have two terms
Layout: states by slot, read and written in place; unit queries and keys [T, Hk, dk], inverses and
    scores [T, H, chunk] and decays [T, H] of whole chunks between the launches of a prompt
Range: dk up to 256, any dv
Technique: whole chunks of tokens by the WY representation (section 3.3): what reads no state for
    all chunks at once, with inverses by forward substitution; then a program for a sequence, a head
    and a block of dv, whose state is both accumulator and operand of the tensor cores. The other
    tokens one by one
Ops: gated_delta_rule

The columns of a state are independent of each other: each block of dv reads all of dk. The chunks
lie at multiples of their length, and a chunk is computed alike wherever a step begins or ends, so
results do not depend on how steps divide a prompt there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from modelmill.ops.gated_delta_rule import L2_EPS, GatedDeltaInputs
from modelmill.ops.recurrent_metadata import has_contiguous_operands
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

MAX_KEY_DIM = 256
STATE_COLUMNS_PER_PROGRAM = 32  # of a state in a program that computes single tokens


def supports(inputs: GatedDeltaInputs) -> bool:
    """Sizes up to the limit; rows and states that lie together."""
    state = inputs.state
    return state.shape[2] <= MAX_KEY_DIM and has_contiguous_operands(
        inputs.qkv, inputs.gates, state
    )


def run(inputs: GatedDeltaInputs) -> torch.Tensor:
    """Compute the op with the Triton kernels; same contract as the reference."""
    _, heads, _, dv = inputs.state.shape
    return launch_tokens_and_chunks(
        inputs.qkv,
        heads * dv,
        inputs.rows,
        partial(_run_tokens, inputs),
        partial(_run_chunks, inputs),
    )


def _run_tokens(inputs: GatedDeltaInputs, out: torch.Tensor, part: Any, chunk: int) -> None:
    """The tokens of a part of each sequence, one by one."""
    qkv, gates, a_log, dt_bias, state, rows = inputs
    _, heads, dk, dv = state.shape
    key_heads = (qkv.shape[1] - heads * dv) // (2 * dk)
    block_k, block_v = (
        max(MIN_DOT_SIZE, next_power_of_two(dk)),
        max(MIN_DOT_SIZE, min(STATE_COLUMNS_PER_PROGRAM, next_power_of_two(dv))),
    )
    _tokens_kernel[(len(rows.slots), heads, -(-dv // block_v))](
        qkv, gates, a_log, dt_bias, state, out, rows.query_start, rows.positions, rows.slots,
        rows.snapshot_slots, rows.snapshot_ends, heads, key_heads, qkv.stride(0), state.stride(0),
        dk**-0.5, L2_EPS, DK=dk, DV=dv, BLOCK_K=block_k, BLOCK_V=block_v, PART=part, CHUNK=chunk,
        num_warps=max(1, min(8, block_k * block_v // 1024)),
    )  # fmt: skip


def _run_chunks(inputs: GatedDeltaInputs, out: torch.Tensor, chunk: int) -> None:
    """The whole chunks of all sequences."""
    qkv, gates, a_log, dt_bias, state, rows = inputs
    _, heads, dk, dv = state.shape
    tokens, key_heads = len(qkv), (qkv.shape[1] - heads * dv) // (2 * dk)
    block_k = max(MIN_DOT_SIZE, next_power_of_two(dk))
    launch = select_chunk_launch_config(qkv, dv, block_k)
    dtype, device = launch.dtype, qkv.device
    squares = 3 if dtype is torch.bfloat16 else 2  # scores, and inverses in one or two terms
    keys = torch.empty((2, tokens, key_heads, dk), dtype=dtype, device=device)
    square = torch.empty((squares, tokens, heads, chunk), dtype=dtype, device=device)
    decay = torch.empty((2, tokens, heads), dtype=torch.float32, device=device)
    sizes = {
        "DK": dk, "DV": dv, "BLOCK_K": block_k, "CHUNK": chunk, "BLOCK_T": MIN_DOT_SIZE,
        "PRECISION": PRECISION,
    }  # fmt: skip
    _chunk_inverse_kernel[(-(-tokens // chunk), heads)](
        qkv, gates, a_log, dt_bias, keys, square, decay, out, rows.query_start, rows.positions,
        len(rows.slots), tokens, heads, key_heads, qkv.stride(0), dk**-0.5, L2_EPS,
        BLOCK_V=next_power_of_two(dv), **sizes, num_warps=launch.prepare_warps, num_stages=1,
    )  # fmt: skip
    _chunks_kernel[(len(rows.slots), heads, -(-dv // launch.rows))](
        qkv, keys, square, decay, state, out, rows.query_start, rows.positions, rows.slots,
        rows.snapshot_slots, rows.snapshot_ends, tokens, heads, key_heads, qkv.stride(0),
        state.stride(0), BLOCK_V=launch.rows, OWN_ROWS=launch.own_rows, **sizes,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


@triton.jit
def _tokens_kernel(
    qkv_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, state_ptr, out_ptr, start_ptr, position_ptr,
    slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, heads, key_heads, row_stride, slot_stride, scale,
    eps, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A part of a sequence's tokens one by one: BLOCK_V columns of the state of a head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, stop, first, kept = load_token_range(
        start_ptr, position_ptr, snapshot_end_ptr, sequence, PART, CHUNK
    )
    if stop > begin:
        k = tl.arange(0, BLOCK_K)
        v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (k < DK)[:, None] & (v < DV)[None, :]
        place = head * DK * DV + k[:, None] * DV + v[None, :]
        s, own, snapshot = load_state_and_store_snapshot(
            state_ptr, slot_ptr, snapshot_slot_ptr, sequence, slot_stride,
                                      place, inside, first, kept == begin)  # fmt: skip
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        q_ptr = qkv_ptr + head // (heads // key_heads) * DK
        k_ptr = q_ptr + key_heads * DK
        v_ptr = qkv_ptr + 2 * key_heads * DK + head * DV
        for t in range(begin, stop):
            row = t * row_stride
            query = tl.load(q_ptr + row + k, mask=k < DK, other=0.0).to(tl.float32)
            key = tl.load(k_ptr + row + k, mask=k < DK, other=0.0).to(tl.float32)
            value = tl.load(v_ptr + row + v, mask=v < DV, other=0.0).to(tl.float32)
            query = query * tl.rsqrt(tl.sum(query * query) + eps) * scale
            key = key * tl.rsqrt(tl.sum(key * key) + eps)
            gate = gates_ptr + head + t * 2 * heads
            beta = 1.0 / (1.0 + tl.exp(-tl.load(gate)))
            s = s * tl.exp(rate * softplus(tl.load(gate + heads) + bias))
            answer = tl.sum(s * key[:, None], 0)
            s = s + key[:, None] * ((value - answer) * beta)[None, :]
            o = tl.sum(s * query[:, None], 0)
            tl.store(out_ptr + (t * heads + head) * DV + v, o, mask=v < DV)
            if t + 1 == kept:
                tl.store(snapshot, s, mask=inside)
        tl.store(own, s, mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _chunk_inverse_kernel(
    qkv_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, keys_ptr, square_ptr, decay_ptr, out_ptr, start_ptr,
    position_ptr, sequences, tokens, heads, key_heads, row_stride, scale, eps, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the chunk that starts in a window, for a head.

    Writes (I + strictly lower part of β k kᵀ ⊙ Γ)⁻¹ diag(β), q kᵀ ⊙ Γ, decays since the start and
    to the end, and the unit queries / √dk and keys; zeros into the outputs of padding.
    """
    head = tl.program_id(1)
    window = tl.program_id(0).to(tl.int64) * CHUNK
    zero_padding_outputs(
        out_ptr, start_ptr, window, sequences, tokens, heads, head, head + 1, DV, BLOCK_V,
                 CHUNK, BLOCK_T)  # fmt: skip
    base = find_chunk_start_in_window(start_ptr, position_ptr, window, sequences, CHUNK)
    if base >= 0:
        i = tl.arange(0, BLOCK_T)
        row, valid = base + i, i < CHUNK
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        gate = gates_ptr + row * 2 * heads + head
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gate, mask=valid, other=0.0)))
        log_decay = rate * softplus(tl.load(gate + heads, mask=valid, other=0.0) + bias)
        log_decay = tl.where(valid, log_decay, 0.0)
        between, since_start, to_end, _ = decays_within_chunk(log_decay, CHUNK, BLOCK_T)
        dtype = keys_ptr.dtype.element_ty
        shared = heads // key_heads  # heads of a key head
        key_head, c = head // shared, tl.arange(0, BLOCK_K)
        mask = valid[:, None] & (c < DK)[None, :]
        q_ptr = qkv_ptr + row[:, None] * row_stride + key_head * DK + c[None, :]
        q = (_l2_normalize_rows(q_ptr, mask, eps) * scale).to(dtype)
        k = _l2_normalize_rows(q_ptr + key_heads * DK, mask, eps).to(dtype)
        if head % shared == 0:
            at = keys_ptr + (row[:, None] * key_heads + key_head) * DK + c[None, :]
            tl.store(at, q, mask=mask)
            tl.store(at + tokens.to(tl.int64) * key_heads * DK, k, mask=mask)
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        # by columns: factors[j, i] is what row i subtracts of row j < i
        factors = tl.trans(products * beta[:, None])
        factors = tl.where(i[:, None] < i[None, :], factors, 0.0)
        solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for each in range(1, CHUNK):
            factor = tl.sum(tl.where(i[None, :] == each, factors, 0.0), 1)
            change = tl.sum(factor[:, None] * solved, 0)
            solved = tl.where(i[:, None] == each, solved - change[None, :], solved)
        inverse = solved * beta[None, :]
        place = row * heads + head
        at = square_ptr + place[:, None] * CHUNK + i[None, :]
        plane = tokens.to(tl.int64) * heads * CHUNK
        square = valid[:, None] & valid[None, :]
        tl.store(at, scores.to(dtype), mask=square)
        if dtype == tl.bfloat16:
            inverse, low = split_mantissa(inverse)
            tl.store(at + 2 * plane, low, mask=square)
        tl.store(at + plane, inverse, mask=square)
        tl.store(decay_ptr + place, since_start, mask=valid)
        tl.store(decay_ptr + tokens * heads + place, to_end, mask=valid)


@triton.jit
def _l2_normalize_rows(x_ptr, mask, eps):
    """Vectors of length 1, of some rows; float32."""
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _chunks_kernel(
    qkv_ptr, keys_ptr, square_ptr, decay_ptr, state_ptr, out_ptr, start_ptr, position_ptr, slot_ptr,
    snapshot_slot_ptr, snapshot_end_ptr, tokens, heads, key_heads, row_stride, slot_stride,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, OWN_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The whole chunks of a sequence: BLOCK_V columns of the state of a head.

    All is transposed, the state [BLOCK_V, dk] and outputs [BLOCK_V, tokens]: so the state and the
    corrected values are left operands as they lie in the registers of accumulators.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, stop, first, kept = load_token_range(
        start_ptr, position_ptr, snapshot_end_ptr, sequence, TOKENS_OF_CHUNKS, CHUNK
    )
    if stop > begin:
        v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        k, i = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_T)
        inside = (v < DV)[:, None] & (k < DK)[None, :]
        place = head * DK * DV + k[None, :] * DV + v[:, None]
        s, own, snapshot = load_state_and_store_snapshot(
            state_ptr, slot_ptr, snapshot_slot_ptr, sequence, slot_stride,
                                      place, inside, first, kept == begin)  # fmt: skip
        valid = i < CHUNK
        mask_k, mask_v = valid[:, None] & (k < DK)[None, :], valid[:, None] & (v < DV)[None, :]
        square = valid[:, None] & valid[None, :]
        dtype = keys_ptr.dtype.element_ty
        decay_ptr += head
        key_head = head // (heads // key_heads)
        plane = tokens.to(tl.int64) * heads * CHUNK
        eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dtype)
        whole = tl.load(decay_ptr + (begin + CHUNK - 1) * heads)
        for base in range(begin, stop, CHUNK):
            row = base + i
            # a chunk ahead: the pipeline has tensors only
            ahead = tl.minimum(base + 2 * CHUNK, stop) - 1
            next_whole = tl.load(decay_ptr + ahead * heads)
            since_start = tl.load(decay_ptr + row * heads, mask=valid, other=0.0)
            to_end = tl.load(decay_ptr + (tokens + row) * heads, mask=valid, other=0.0)
            at = keys_ptr + (row[:, None] * key_heads + key_head) * DK + k[None, :]
            query = tl.load(at, mask=mask_k, other=0.0)
            key = tl.load(at + tokens.to(tl.int64) * key_heads * DK, mask=mask_k, other=0.0)
            at = qkv_ptr + row[:, None] * row_stride + 2 * key_heads * DK + head * DV + v[None, :]
            value = tl.load(at, mask=mask_v, other=0.0).to(dtype)
            at = square_ptr + (row[:, None] * heads + head) * CHUNK + i[None, :]
            scores = tl.load(at, mask=square, other=0.0)
            inverse = tl.load(at + plane, mask=square, other=0.0)
            value = tl.trans(value)
            if OWN_ROWS:  # as an accumulator: what follows stays in a thread's registers
                value = tl.dot(value, eye)
            o = tl.dot(s.to(dtype), tl.trans(query), input_precision=PRECISION)
            answer = dot_split_mantissa(s, tl.trans(key), PRECISION, ONE_SUM=False)
            missing = value - answer * since_start[None, :]
            corrected = dot_split_mantissa(missing, tl.trans(inverse), PRECISION, ONE_SUM=False)
            if dtype == tl.bfloat16:
                low = tl.load(at + 2 * plane, mask=square, other=0.0)
                corrected = tl.fma(tl.dot(missing.to(dtype), tl.trans(low)), 1.0, corrected)
            # The last product of a chunk in the program's text decides whether the warps divide
            # rows or columns of all.
            if OWN_ROWS:
                added = dot_split_mantissa(
                    corrected * to_end[None, :], key, PRECISION, ONE_SUM=True
                )
            o *= since_start[None, :]
            o = tl.dot(corrected.to(dtype), tl.trans(scores), o, input_precision=PRECISION)
            out = out_ptr + (row[None, :] * heads + head) * DV + v[:, None]
            tl.store(out, o, mask=valid[None, :] & (v < DV)[:, None])
            if not OWN_ROWS:
                added = dot_split_mantissa(
                    corrected * to_end[None, :], key, PRECISION, ONE_SUM=True
                )
            s = decay_and_add_to_state(s, whole, added)
            if base + CHUNK == kept:
                tl.store(snapshot, s, mask=inside)
            whole = next_whole
        tl.store(own, s, mask=inside)
