"""The gated delta rule, with each head's state in registers (arXiv:2412.06464).

Computes: o[T, H, dv] and the states [H, dk, dv] of decodes and prompts, with a snapshot of each
Dtypes: q, k, v bfloat16, float16 or float32; states and arithmetic float32
Layout: states by slot, read and written in place; inverses of chunks [T, H, chunk] between the two
    launches of a prompt
Range: dk up to 256, any dv
Technique: a program for a sequence, a head and a block of dv. Whole chunks of tokens by the WY
    representation (section 3.3) on tensor cores, with their inverses by forward substitution, all
    chunks at once; the other tokens one by one
Ops: gated_delta_rule

The columns of a state are independent of each other: each block of dv reads all of dk. The chunks
lie at multiples of their length, so results do not depend on how steps divide a prompt there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.gated_delta_rule import L2_EPS, GatedDeltaInputs
from modelmill.ops.state_rows import has_packed_operands
from modelmill.ops.triton.attention.recurrence import (
    MIN_DOT,
    PRECISION,
    add_to_state,
    chunk_in_window,
    decays,
    kernel_chunk,
    open_state,
    softplus,
    stages,
    whole_chunks,
)
from modelmill.ops.triton.common.device import available_on_any_gpu, power_of_two

available = available_on_any_gpu

MAX_KEY_DIM, BLOCK_V = 256, 32


def supports(inputs: GatedDeltaInputs) -> bool:
    """Sizes up to the limit; rows and states that lie together."""
    state = inputs.state
    return state.shape[2] <= MAX_KEY_DIM and has_packed_operands(inputs.qkv, inputs.gates, state)


def run(inputs: GatedDeltaInputs) -> torch.Tensor:
    """Compute the op with the Triton kernels; same contract as the reference."""
    qkv, gates, a_log, dt_bias, state, rows = inputs
    _, heads, dk, dv = state.shape
    tokens = len(qkv)
    key_heads = (qkv.shape[1] - heads * dv) // (2 * dk)
    block_k, block_v = max(MIN_DOT, power_of_two(dk)), max(MIN_DOT, min(BLOCK_V, power_of_two(dv)))
    chunk = kernel_chunk(rows.chunk, decode=rows.is_decode)
    make = torch.empty if rows.is_decode else torch.zeros  # a prompt may be padded
    out = make((tokens, heads * dv), dtype=torch.float32, device=qkv.device)
    inverse = out  # of decodes: not read
    shared = {
        "DK": dk, "BLOCK_K": block_k, "CHUNK": chunk, "BLOCK_T": max(MIN_DOT, chunk),
        "PRECISION": PRECISION,
    }  # fmt: skip
    if chunk > 0:
        inverse = torch.empty((tokens, heads, chunk), dtype=torch.float32, device=qkv.device)
        _chunk_inverse_kernel[(-(-tokens // chunk), heads)](
            qkv, gates, a_log, dt_bias, inverse, rows.query_start, rows.positions,
            len(rows.slots), heads, key_heads, qkv.stride(0), L2_EPS, **shared, num_warps=4,
            num_stages=1,
        )  # fmt: skip
    _delta_rule_kernel[(len(rows.slots), heads, -(-dv // block_v))](
        qkv, gates, a_log, dt_bias, state, inverse, out, rows.query_start, rows.positions,
        rows.slots, rows.snapshot_slots, rows.snapshot_ends, heads, key_heads, qkv.stride(0),
        state.stride(0), dk**-0.5, L2_EPS, DV=dv, BLOCK_V=block_v, **shared,
        num_warps=max(1, min(8, block_k * block_v // 1024)), num_stages=stages(block_k),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["sequences"])
def _chunk_inverse_kernel(
    qkv_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, inverse_ptr, start_ptr, position_ptr, sequences,
    heads, key_heads, row_stride, eps, DK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(I + strictly lower part of β k kᵀ ⊙ Γ)⁻¹ diag(β) of the chunk that starts in a window."""
    head = tl.program_id(1)
    window = tl.program_id(0).to(tl.int64) * CHUNK
    base = chunk_in_window(start_ptr, position_ptr, window, sequences, CHUNK)
    if base >= 0:
        i = tl.arange(0, BLOCK_T)
        row, valid = base + i, i < CHUNK
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        beta, log_decay = _gates(gates_ptr + row * 2 * heads + head, heads, rate, bias, valid)
        between, _, _, _ = decays(log_decay, CHUNK, BLOCK_T)
        column = (key_heads + head // (heads // key_heads)) * DK
        k = _l2_normalize_rows(qkv_ptr + column, row, row_stride, valid, eps, DK, BLOCK_K)
        products = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between
        # by columns: factors[j, i] is what row i subtracts of row j < i
        factors = tl.trans(products * beta[:, None])
        factors = tl.where(i[:, None] < i[None, :], factors, 0.0)
        solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for each in range(1, CHUNK):
            factor = tl.sum(tl.where(i[None, :] == each, factors, 0.0), 1)
            change = tl.sum(factor[:, None] * solved, 0)
            solved = tl.where(i[:, None] == each, solved - change[None, :], solved)
        place = inverse_ptr + (row[:, None] * heads + head) * CHUNK + i[None, :]
        tl.store(place, solved * beta[None, :], mask=valid[:, None] & valid[None, :])


@triton.jit
def _gates(gate, heads, rate, bias, valid):
    """β and log α; 0 where there is no token."""
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gate, mask=valid, other=0.0)))
    log_decay = rate * softplus(tl.load(gate + heads, mask=valid, other=0.0) + bias)
    return tl.where(valid, beta, 0.0), tl.where(valid, log_decay, 0.0)


@triton.jit
def _l2_normalize_rows(
    x_ptr, row, row_stride, valid, eps, DK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Vectors of length 1, of some rows [BLOCK_T, BLOCK_K] float32."""
    k = tl.arange(0, BLOCK_K)
    mask = valid[:, None] & (k < DK)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + k[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]


@triton.jit
def _delta_rule_kernel(
    qkv_ptr, gates_ptr, a_log_ptr, dt_bias_ptr, state_ptr, inverse_ptr, out_ptr, start_ptr,
    position_ptr, slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, heads, key_heads, row_stride,
    slot_stride, scale, eps, DV: tl.constexpr, BLOCK_V: tl.constexpr, DK: tl.constexpr,
    BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(start_ptr + sequence).to(tl.int64)
    stop = tl.load(start_ptr + sequence + 1).to(tl.int64)
    if stop > start:
        k = tl.arange(0, BLOCK_K)
        v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (k < DK)[:, None] & (v < DV)[None, :]
        place = head * DK * DV + k[:, None] * DV + v[None, :]
        first = tl.load(position_ptr + start)
        s, own, snapshot, end = open_state(
            state_ptr, slot_ptr, snapshot_slot_ptr, snapshot_end_ptr, sequence, first, slot_stride,
            place, inside,
        )  # fmt: skip
        rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        q_ptr = qkv_ptr + head // (heads // key_heads) * DK
        k_ptr = q_ptr + key_heads * DK
        v_ptr = qkv_ptr + 2 * key_heads * DK + head * DV
        gates, out = gates_ptr + head, out_ptr + head * DV
        kept = end - first + start
        t = start
        if CHUNK > 0:
            t, last = whole_chunks(start, stop, first, end, CHUNK)
            s = _tokens(s, start, t, kept, snapshot, inside, q_ptr, k_ptr, v_ptr, gates, out,
                        row_stride, heads, rate, bias, scale, eps, k, v, DK, DV)  # fmt: skip
            i = tl.arange(0, BLOCK_T)
            valid = i < CHUNK
            square = valid[:, None] & valid[None, :]
            for base in range(t, last, CHUNK):
                row = base + i
                _, log_decay = _gates(gates + row * 2 * heads, heads, rate, bias, valid)
                between, since_start, to_end, whole = decays(log_decay, CHUNK, BLOCK_T)
                query = _l2_normalize_rows(q_ptr, row, row_stride, valid, eps, DK, BLOCK_K) * scale
                key = _l2_normalize_rows(k_ptr, row, row_stride, valid, eps, DK, BLOCK_K)
                mask = valid[:, None] & (v < DV)[None, :]
                at = row[:, None] * row_stride + v[None, :]
                value = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
                answer = tl.dot(key * since_start[:, None], s, input_precision=PRECISION)
                at = (row[:, None] * heads + head) * CHUNK + i[None, :]
                inverse = tl.load(inverse_ptr + at, mask=square, other=0.0)
                corrected = tl.dot(inverse, value - answer, input_precision=PRECISION)
                scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * between
                o = tl.dot(query * since_start[:, None], s, input_precision=PRECISION)
                o = tl.dot(scores, corrected, o, input_precision=PRECISION)
                tl.store(out + row[:, None] * heads * DV + v[None, :], o, mask=mask)
                kept_key = tl.trans(key * to_end[:, None])
                added = tl.dot(kept_key, corrected, input_precision=PRECISION)
                s = add_to_state(s, whole, added)
                if base + CHUNK == kept:
                    tl.store(snapshot, s, mask=inside)
            t = last
        s = _tokens(s, t, stop, kept, snapshot, inside, q_ptr, k_ptr, v_ptr, gates, out,
                    row_stride, heads, rate, bias, scale, eps, k, v, DK, DV)  # fmt: skip
        tl.store(own, s, mask=inside)


@triton.jit
def _tokens(
    s, start, stop, kept, snapshot, inside, q_ptr, k_ptr, v_ptr, gates, out, row_stride, heads,
    rate, bias, scale, eps, k, v, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The tokens [start, stop) one by one; returns the state behind them."""
    for t in range(start, stop):
        row = t * row_stride
        query = tl.load(q_ptr + row + k, mask=k < DK, other=0.0).to(tl.float32)
        key = tl.load(k_ptr + row + k, mask=k < DK, other=0.0).to(tl.float32)
        value = tl.load(v_ptr + row + v, mask=v < DV, other=0.0).to(tl.float32)
        query = query * tl.rsqrt(tl.sum(query * query) + eps) * scale
        key = key * tl.rsqrt(tl.sum(key * key) + eps)
        gate = gates + t * 2 * heads
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gate)))
        s = s * tl.exp(rate * softplus(tl.load(gate + heads) + bias))
        answer = tl.sum(s * key[:, None], 0)
        s = s + key[:, None] * ((value - answer) * beta)[None, :]
        tl.store(out + t * heads * DV + v, tl.sum(s * query[:, None], 0), mask=v < DV)
        if t + 1 == kept:
            tl.store(snapshot, s, mask=inside)
    return s
