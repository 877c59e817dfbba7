"""Decode attention over a paged cache: one query per sequence, split context, and the merge.

Computes: out[B, heads · D] for one query per sequence, in splits of the context, and the merge of
    the splits
Dtypes: q and out bfloat16, float16 or float32; pages of q's dtype, int8 or e4m3 with float32 scales
    per token and head
Layout: pages [pages, kv_heads, page_size, D]; int32 page tables
Range: decode; D 8 … 256, page_size a power of two
Technique: split-KV (up to 64 splits), tensor cores (GQA) or vectors of one head, PDL
Ops: paged_attention

8-bit pages are read as stored; their scales multiply the scores (keys) and the softmax weights
(values), one number per key instead of one per element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelmill.ops.triton.attention.online_softmax import combine_partials, softmax_weights
from modelmill.ops.triton.attention.score_mods import apply_softcap, load_log2_scaled_head_values
from modelmill.ops.triton.common.dtype_convert import (
    log2,
    scale_to_unit_float16,
    to_float32,
    unpack_8bit_pair_to_float16,
    widen_8bit_to_float16,
)
from modelmill.ops.triton.common.pdl import pdl_wait_and_trigger


@triton.jit
def split_range(length, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Keys [begin, end) of a split; empty if the context has fewer blocks than splits."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SPLITS == 1:
        return first, length
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), MIN_KEYS) * MIN_KEYS
    begin = first + split * share
    return begin, tl.minimum(begin + share, length)


@triton.jit
def load_sequence_bounds(starts_ptr, lengths_ptr, sequence):
    """(first row of q, the row after its last, keys) of a sequence."""
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    return row, tl.load(starts_ptr + sequence + 1), tl.load(lengths_ptr + sequence)


@triton.jit
def key_offsets(
    tables_ptr, key, columns, page_stride, token_stride, PAGE: tl.constexpr, WIDE: tl.constexpr
):
    """Offsets of keys in the cache, in elements.

    Table indices are clamped instead of masked, so that the address depends only on the table.
    Offsets of keys beyond the context are computed but not loaded.
    """
    page = tl.load(tables_ptr + tl.minimum(key // PAGE, columns - 1))
    if WIDE:
        page = page.to(tl.int64)
    return page * page_stride + (key % PAGE) * token_stride


@triton.jit
def offsets_as_unsigned(offsets):
    """Cast non-negative offsets to unsigned: dividing by a power of two is then a shift."""
    return offsets.to(tl.uint64) if offsets.dtype == tl.int64 else offsets.to(tl.uint32)


@triton.jit(do_not_specialize=["columns", "table_stride"])
def paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr,
    parts_ptr, sums_ptr, slopes_ptr, sinks_ptr,
    scale, columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, MIN_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr, TURNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One query head per program, with vector instructions."""
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, row_end, length = load_sequence_bounds(starts_ptr, lengths_ptr, sequence)
    begin, end = split_range(length, split, WINDOW, SPLITS, MIN_KEYS)
    tables_ptr += sequence * table_stride
    kv = (head // GROUP).to(tl.int64) * head_stride
    # [BLOCK_N, TURNS] keys per iteration: a lane rescales its sum once per TURNS keys.
    n = tl.arange(0, BLOCK_N)[:, None] + BLOCK_N * tl.arange(0, TURNS)[None, :]
    d = tl.arange(0, BLOCK_D)
    offsets = key_offsets(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    pdl_wait_and_trigger(PDL)
    if row_end - row != 1:
        return
    if SPLITS > 1 and begin >= end:  # the merge ignores splits without keys
        return
    dim_valid = d < DIM
    q = (
        tl.load(q_ptr + row * q_stride + head * q_head + d, mask=dim_valid, other=0.0).to(
            tl.float32
        )
        * scale
    )
    k_at = k_ptr + kv + d[None, None, :]
    v_at = v_ptr + kv + d[None, None, :]
    # Each of the BLOCK_N lanes has its own running softmax: no reduction across lanes in the loop.
    row_max = tl.full([BLOCK_N], -1.0e30, tl.float32)
    exp_sum = tl.zeros([BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N * TURNS):
        key = start + n
        valid = key < end
        inside = valid[:, :, None] & dim_valid[None, None, :]
        # The next block's pages are looked up while this block's keys are loaded.
        next_offsets = key_offsets(
            tables_ptr, key + BLOCK_N * TURNS, columns, page_stride, token_stride, PAGE, WIDE
        )
        k = tl.load(k_at + offsets[:, :, None], mask=inside, other=0.0)
        v = tl.load(v_at + offsets[:, :, None], mask=inside, other=0.0)
        score = tl.sum(to_float32(k) * q[None, None, :], axis=2)
        if SCALED:
            scale_index = kv // DIM + offsets_as_unsigned(offsets) // DIM
            score *= tl.load(k_scale_ptr + scale_index, mask=valid, other=0.0)
            v_scale = tl.load(v_scale_ptr + scale_index, mask=valid, other=0.0)
        if SOFTCAP > 0:
            score = apply_softcap(score, SOFTCAP)
        if ALIBI:
            score += load_log2_scaled_head_values(slopes_ptr, head) * (key - (length - 1)).to(
                tl.float32
            )
        score = tl.where(valid, score, float("-inf"))
        new_max, rescale, weight = softmax_weights(score, row_max)
        exp_sum = exp_sum * rescale + tl.sum(weight, axis=1)
        if SCALED:
            weight *= v_scale
        acc = acc * rescale[:, None] + tl.sum(weight[:, :, None] * to_float32(v), axis=1)
        row_max = new_max
        offsets = next_offsets
    out, max_all, total = combine_partials(acc, row_max, exp_sum)
    if SPLITS == 1:
        if SINKS:
            total += tl.exp2(load_log2_scaled_head_values(sinks_ptr, head) - max_all)
        out = out / tl.where(total > 0.0, total, 1.0)
        tl.store(
            out_ptr + (row * HEADS + head) * DIM + d,
            out.to(out_ptr.dtype.element_ty),
            mask=dim_valid,
        )
    else:
        part = (sequence * HEADS + head).to(tl.int64) * SPLITS + split
        tl.store(parts_ptr + part * DIM + d, out, mask=dim_valid)
        tl.store(sums_ptr + part * 2, max_all)
        tl.store(sums_ptr + part * 2 + 1, total)


@triton.jit(do_not_specialize=["columns", "table_stride"])
def grouped_paged_decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr,
    parts_ptr, sums_ptr, slopes_ptr, sinks_ptr,
    scale, columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    PDL: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr,
    MIN_KEYS: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """All query heads of one KV head per program, on tensor cores.

    PAIRED: 8-bit values are read in pairs, and even and odd channels are accumulated separately.
    """
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, row_end, length = load_sequence_bounds(starts_ptr, lengths_ptr, sequence)
    begin, end = split_range(length, split, WINDOW, SPLITS, MIN_KEYS)
    tables_ptr += sequence * table_stride
    kv = kv_head.to(tl.int64) * head_stride
    n, d, g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    offsets = key_offsets(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    pdl_wait_and_trigger(PDL)
    if row_end - row != 1:
        return
    if SPLITS > 1 and begin >= end:
        return
    dim_valid = d < DIM
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & dim_valid[None, :]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    if SCALED:
        q, q_factor = scale_to_unit_float16(q)
        scale *= q_factor
    k_at = k_ptr + kv + d[None, :]
    if PAIRED:
        half: tl.constexpr = BLOCK_D // 2
        v_dtype: tl.constexpr = v_ptr.dtype.element_ty
        d2 = tl.arange(0, half)
        v_pair = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + kv // 2 + d2[None, :]
        acc_odd = tl.zeros([BLOCK_G, half], tl.float32)
        acc = tl.zeros([BLOCK_G, half], tl.float32)
    else:
        v_at = v_ptr + kv + d[None, :]
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    if ALIBI:
        slope = load_log2_scaled_head_values(slopes_ptr, tl.minimum(head, HEADS - 1))
    row_max = tl.full([BLOCK_G], -1.0e30, tl.float32)
    exp_sum = tl.zeros([BLOCK_G], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        valid = key < end
        # The next block's pages are looked up while this block's keys are loaded.
        next_offsets = key_offsets(
            tables_ptr, key + BLOCK_N, columns, page_stride, token_stride, PAGE, WIDE
        )
        k = tl.load(k_at + offsets[:, None], mask=valid[:, None] & dim_valid[None, :], other=0.0)
        if PAIRED:
            pair = tl.load(
                v_pair + (offsets[:, None] >> 1),
                mask=valid[:, None] & (d2 < DIM // 2)[None, :],
                other=0,
            )
        else:
            v = tl.load(
                v_at + offsets[:, None], mask=valid[:, None] & dim_valid[None, :], other=0.0
            )
        score = tl.dot(q, tl.trans(widen_8bit_to_float16(k)))
        if SCALED:
            # The scale of a value is added to the exponent of its softmax weight, which is at most
            # 1 and so in the range of float16. The sum of the weights divides it out again.
            scale_index = kv // DIM + offsets_as_unsigned(offsets) // DIM
            k_scale = tl.load(k_scale_ptr + scale_index, mask=valid, other=1.0) * scale
            v_scale = tl.load(v_scale_ptr + scale_index, mask=valid, other=1.0)
            score *= k_scale[None, :]
        else:
            score *= scale
        if SOFTCAP > 0:
            score = apply_softcap(score, SOFTCAP)
        if ALIBI:
            score += slope[:, None] * (key - (length - 1)).to(tl.float32)[None, :]
        if SCALED:
            score += log2(v_scale)[None, :]
        score = tl.where(valid[None, :], score, float("-inf"))
        new_max, rescale, weight = softmax_weights(score, row_max)
        if SCALED:
            exp_sum = exp_sum * rescale + tl.sum(weight * (1.0 / v_scale)[None, :], axis=1)
        else:
            exp_sum = exp_sum * rescale + tl.sum(weight, axis=1)
        if PAIRED:
            even_v, odd_v = unpack_8bit_pair_to_float16(pair, v_dtype)
            weight = weight.to(tl.float16)
            acc = tl.dot(weight, even_v, acc * rescale[:, None])
            acc_odd = tl.dot(weight, odd_v, acc_odd * rescale[:, None])
        else:
            v = widen_8bit_to_float16(v)
            acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
        offsets = next_offsets
    if PAIRED:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_G, BLOCK_D])
    if SPLITS == 1:
        if SINKS:
            exp_sum += tl.exp2(
                load_log2_scaled_head_values(sinks_ptr, tl.minimum(head, HEADS - 1)) - row_max
            )
        out = acc / tl.where(exp_sum > 0.0, exp_sum, 1.0)[:, None]
        target = out_ptr + (row * HEADS + head[:, None]) * DIM + d[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = (sequence * HEADS + head).to(tl.int64) * SPLITS + split
        tl.store(parts_ptr + part[:, None] * DIM + d[None, :], acc, mask=mask)
        tl.store(sums_ptr + part * 2, row_max, mask=g < GROUP)
        tl.store(sums_ptr + part * 2 + 1, exp_sum, mask=g < GROUP)


@triton.jit
def merge_splits_kernel(
    parts_ptr, sums_ptr, starts_ptr, lengths_ptr, out_ptr, sinks_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of all splits of one head and sequence."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    row_end = tl.load(starts_ptr + sequence + 1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    begin, end = split_range(tl.load(lengths_ptr + sequence), s, WINDOW, SPLITS, MIN_KEYS)
    pdl_wait_and_trigger(PDL)
    part = (sequence * HEADS + head).to(tl.int64) * SPLITS + s
    # Loaded in any case, so that the loads do not wait for the length; unused splits are masked
    # below.
    split_max = tl.load(sums_ptr + part * 2, mask=s < SPLITS, other=0.0)
    exp_sum = tl.load(sums_ptr + part * 2 + 1, mask=s < SPLITS, other=0.0)
    inside = (s < SPLITS)[:, None] & (d < DIM)[None, :]
    acc = tl.load(parts_ptr + part[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    used = (s < SPLITS) & (begin < end) & (row_end - row == 1)
    split_max = tl.where(used, split_max, -1.0e30)
    exp_sum = tl.where(used, exp_sum, 0.0)
    acc = tl.where(used[:, None], acc, 0.0)
    out, max_all, total = combine_partials(acc, split_max, exp_sum)
    if SINKS:
        total += tl.exp2(load_log2_scaled_head_values(sinks_ptr, head) - max_all)
    out = out / tl.where(total > 0.0, total, 1.0)
    if row_end - row == 1:
        tl.store(
            out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM
        )
