"""Prefill attention over a paged cache: tiles of queries, on tensor cores.

Computes: out[T, heads · D] = softmax(q · Kᵀ) · V for tiles of queries, causal, optional sliding
    window, GQA
Dtypes: q and out bfloat16, float16 or float32; pages of q's dtype, int8 or e4m3 with float32 scales
    per token and head
Layout: pages [pages, kv_heads, page_size, D]; int32 page tables
Range: prefill; D 8 … 256, page_size a power of two
Technique: flash attention on tensor cores, tiles with the most keys first
Ops: paged_attention
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelmill.ops.triton.attention.paged_decode import key_offsets, offsets_as_unsigned
from modelmill.ops.triton.attention.score_mods import apply_softcap, load_log2_scaled_head_values
from modelmill.ops.triton.common.dtype_convert import (
    scale_to_unit_float16,
    to_float32,
    widen_8bit_to_float16,
)


@triton.jit(do_not_specialize=["batch", "columns", "table_stride"])
def paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr, tables_ptr, starts_ptr,
    lengths_ptr, out_ptr, scale,
    batch, columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, MIXED: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The last queries have the most keys: their tiles are started first for all heads, so that they
    # do not finish last.
    """Compute tiles of queries of one head; programs of a head take tiles in turn."""
    b = tl.arange(0, BLOCK_B)
    counts = tl.load(starts_ptr + b + 1, mask=b < batch, other=0) - tl.load(
        starts_ptr + b, mask=b < batch, other=0
    )
    tile_counts = tl.where(counts > (1 if MIXED else 0), (counts + BLOCK_M - 1) // BLOCK_M, 0)
    tile_ends, total = tl.cumsum(tile_counts, 0), tl.sum(tile_counts, 0)
    for turn in range(tl.program_id(1), total, tl.num_programs(1)):
        tile = total - 1 - turn
        sequence = tl.sum(((tile_ends <= tile) & (b < batch)).to(tl.int32), axis=0)
        block = tile - tl.sum(tl.where(b < sequence, tile_counts, 0), axis=0)
        _compute_prefill_tile(
            q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr, tables_ptr,
            starts_ptr, lengths_ptr, out_ptr, scale,
            columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
            tl.program_id(0),
            sequence, block, HEADS, GROUP, DIM, PAGE, WIDE, WINDOW, SCALED, SOFTCAP, ALIBI, SINKS,
            BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _compute_prefill_tile(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr, tables_ptr, starts_ptr,
    lengths_ptr, out_ptr, scale,
    columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride, head, sequence,
    block,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute queries ``block`` · BLOCK_M … of a sequence, for one head."""
    row = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - row
    m, n, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    # negative for padding: the loops are then empty
    history = tl.load(lengths_ptr + sequence) - count
    at = (row + m).to(tl.int64)
    mask = (m < count)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + at[:, None] * q_stride + head * q_head + d[None, :], mask=mask, other=0.0)
    if SCALED and q.dtype != tl.float32:
        q, q_factor = scale_to_unit_float16(q)
        scale *= q_factor
    kv = (head // GROUP).to(tl.int64) * head_stride
    if SCALED:
        k_scale_ptr += kv // DIM
        v_scale_ptr += kv // DIM
    tables_ptr += sequence * table_stride
    position = history + m
    end = history + tl.minimum((block + 1) * BLOCK_M, count)
    # keys before this one need no causal mask
    unmasked_end = (history + block * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(history + block * BLOCK_M + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        unmasked_end = begin
    slope = load_log2_scaled_head_values(slopes_ptr, head) if ALIBI else 0.0
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offsets = key_offsets(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    for start in range(begin, unmasked_end, BLOCK_N):
        next_offsets = key_offsets(
            tables_ptr, start + BLOCK_N + n, columns, page_stride, token_stride, PAGE, WIDE
        )
        row_max, exp_sum, acc = attend_key_block(
            q, k_ptr + kv, v_ptr + kv, k_scale_ptr, v_scale_ptr, offsets, start + n, end, position,
            row_max, exp_sum, acc, scale, slope, False, 0, SCALED, SOFTCAP, ALIBI, DIM,
            BLOCK_D,
        )  # fmt: skip
        offsets = next_offsets
    for start in range(tl.maximum(unmasked_end, begin), end, BLOCK_N):
        next_offsets = key_offsets(
            tables_ptr, start + BLOCK_N + n, columns, page_stride, token_stride, PAGE, WIDE
        )
        row_max, exp_sum, acc = attend_key_block(
            q, k_ptr + kv, v_ptr + kv, k_scale_ptr, v_scale_ptr, offsets, start + n, end, position,
            row_max, exp_sum, acc, scale, slope, True, WINDOW, SCALED, SOFTCAP, ALIBI, DIM,
            BLOCK_D,
        )  # fmt: skip
        offsets = next_offsets
    if SINKS:
        exp_sum += tl.exp2(load_log2_scaled_head_values(sinks_ptr, head) - row_max)
    out = acc / tl.where(exp_sum > 0.0, exp_sum, 1.0)[:, None]
    target = out_ptr + (at[:, None] * HEADS + head) * DIM + d[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend_key_block(
    q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, offsets, key, end, position, row_max, exp_sum, acc,
    scale, slope,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Process one block of keys at ``offsets`` in the cache: update maximum, sum and output."""
    d = tl.arange(0, BLOCK_D)
    at = offsets[:, None] + d[None, :]
    if MASKED:
        inside = (key < end)[:, None] & (d < DIM)[None, :]
        k = tl.load(k_ptr + at, mask=inside, other=0.0)
        v = tl.load(v_ptr + at, mask=inside, other=0.0)
    elif BLOCK_D != DIM:
        k = tl.load(k_ptr + at, mask=(d < DIM)[None, :], other=0.0)
        v = tl.load(v_ptr + at, mask=(d < DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at)
        v = tl.load(v_ptr + at)
    if SCALED:
        # Many queries share a block, so the elements are scaled, two at a time.
        scale_index = offsets_as_unsigned(offsets) // DIM
        if MASKED:
            k_scale = tl.load(k_scale_ptr + scale_index, mask=key < end, other=0.0)[:, None]
            v_scale = tl.load(v_scale_ptr + scale_index, mask=key < end, other=0.0)[:, None]
        else:
            k_scale = tl.load(k_scale_ptr + scale_index)[:, None]
            v_scale = tl.load(v_scale_ptr + scale_index)[:, None]
        if q.dtype == tl.float32:
            k, v = to_float32(k) * k_scale, to_float32(v) * v_scale
        else:
            k, v = (
                widen_8bit_to_float16(k) * k_scale.to(tl.float16),
                widen_8bit_to_float16(v) * v_scale.to(tl.float16),
            )
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        score = apply_softcap(score * scale, SOFTCAP)
        scale = 1.0
    if ALIBI:
        score = score * scale + slope * (key[None, :] - position[:, None]).to(tl.float32)
        scale = 1.0
    if MASKED:
        allowed = key[None, :] <= position[:, None]
        if WINDOW > 0:
            allowed = allowed & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(allowed, score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(score, axis=1) * scale)
    rescale, weight = tl.exp2(row_max - new_max), tl.exp2(score * scale - new_max[:, None])
    exp_sum = exp_sum * rescale + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_max, exp_sum, acc
