"""Decoding over a paged cache: one query a sequence, its context split among programs, and the
merge of their parts.

Pages of 8 bits are read as they are; their scales multiply the scores (keys) and the weights
(values), one number a
key instead of one an element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelmill.ops.triton.dtype_convert import (
    log2,
    normalize_float16,
    to_float16,
    to_float32,
    unpack_pair,
)
from modelmill.ops.triton.pdl import pdl_wait


@triton.jit
def split_range(length, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Keys [begin, end) of a split; empty where the context has fewer blocks than there are
    splits.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SPLITS == 1:
        return first, length
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), LEAST) * LEAST
    begin = first + split * share
    return begin, tl.minimum(begin + share, length)


@triton.jit
def key_offsets(
    tables_ptr, key, columns, page_stride, token_stride, PAGE: tl.constexpr, WIDE: tl.constexpr
):
    """Offsets of keys in the cache, in elements.

    Clamped to the row of the table instead of masked: the address then waits for nothing but the
    table. What a
    column past the context names is computed, and never read.
    """
    page = tl.load(tables_ptr + tl.minimum(key // PAGE, columns - 1))
    if WIDE:
        page = page.to(tl.int64)
    return page * page_stride + (key % PAGE) * token_stride


@triton.jit
def as_unsigned(offsets):
    """The same numbers, never negative, unsigned: a division by a power of two is then a shift."""
    return offsets.to(tl.uint64) if offsets.dtype == tl.int64 else offsets.to(tl.uint32)


@triton.jit(do_not_specialize=["columns", "table_stride"])
def decode_heads(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr,
    parts_ptr, sums_ptr,
    scale, columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr, TURNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One query head a program, multiplied and summed as vectors."""
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    after = tl.load(starts_ptr + sequence + 1)
    begin, end = split_range(tl.load(lengths_ptr + sequence), split, WINDOW, SPLITS, LEAST)
    tables_ptr += sequence * table_stride
    kv = (head // GROUP).to(tl.int64) * head_stride
    # [BLOCK_N, TURNS] keys at a time: a lane's mixture is brought to a new maximum once in TURNS
    # keys.
    n = tl.arange(0, BLOCK_N)[:, None] + BLOCK_N * tl.arange(0, TURNS)[None, :]
    d = tl.arange(0, BLOCK_D)
    place = key_offsets(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    pdl_wait(PDL)
    if after - row != 1:
        return
    if SPLITS > 1 and begin >= end:  # the merge counts the splits that have keys
        return
    real = d < DIM
    q = (
        tl.load(q_ptr + row * q_stride + head * q_head + d, mask=real, other=0.0).to(tl.float32)
        * scale
    )
    k_at = k_ptr + kv + d[None, None, :]
    v_at = v_ptr + kv + d[None, None, :]
    # Each of the BLOCK_N lanes keeps its own softmax: inside the loop nothing is reduced across
    # lanes.
    top = tl.full([BLOCK_N], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N * TURNS):
        key = start + n
        seen = key < end
        inside = seen[:, :, None] & real[None, None, :]
        # The next block's pages are looked up while this one's keys are on their way.
        after_place = key_offsets(
            tables_ptr, key + BLOCK_N * TURNS, columns, page_stride, token_stride, PAGE, WIDE
        )
        k = tl.load(k_at + place[:, :, None], mask=inside, other=0.0)
        v = tl.load(v_at + place[:, :, None], mask=inside, other=0.0)
        score = tl.sum(to_float32(k) * q[None, None, :], axis=2)
        if SCALED:
            beside = kv // DIM + as_unsigned(place) // DIM
            score *= tl.load(k_scale_ptr + beside, mask=seen, other=0.0)
            v_scale = tl.load(v_scale_ptr + beside, mask=seen, other=0.0)
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        keep, add = tl.exp2(top - new), tl.exp2(score - new[:, None])
        mass = mass * keep + tl.sum(add, axis=1)
        if SCALED:
            add *= v_scale
        mixed = mixed * keep[:, None] + tl.sum(add[:, :, None] * to_float32(v), axis=1)
        top = new
        place = after_place
    highest = tl.max(top, axis=0)
    share = tl.exp2(top - highest)
    total = tl.sum(mass * share, axis=0)
    out = tl.sum(mixed * share[:, None], axis=0)
    if SPLITS == 1:
        out = out / tl.where(total > 0.0, total, 1.0)
        tl.store(
            out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=real
        )
    else:
        part = (sequence * HEADS + head).to(tl.int64) * SPLITS + split
        tl.store(parts_ptr + part * DIM + d, out, mask=real)
        tl.store(sums_ptr + part * 2, highest)
        tl.store(sums_ptr + part * 2 + 1, total)


@triton.jit(do_not_specialize=["columns", "table_stride"])
def decode_head_groups(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr,
    parts_ptr, sums_ptr,
    scale, columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    PAGE: tl.constexpr, WIDE: tl.constexpr, SCALED: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr, PAIRED: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head a program, on the tensor cores.

    PAIRED: values of 8 bits are read two at a time, their even and their odd channels mixed by
    themselves.
    """
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    after = tl.load(starts_ptr + sequence + 1)
    begin, end = split_range(tl.load(lengths_ptr + sequence), split, WINDOW, SPLITS, LEAST)
    tables_ptr += sequence * table_stride
    kv = kv_head.to(tl.int64) * head_stride
    n, d, g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    place = key_offsets(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    pdl_wait(PDL)
    if after - row != 1:
        return
    if SPLITS > 1 and begin >= end:
        return
    real = d < DIM
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & real[None, :]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    if SCALED:
        q, most = normalize_float16(q)
        scale *= most
    k_at = k_ptr + kv + d[None, :]
    if PAIRED:
        half: tl.constexpr = BLOCK_D // 2
        held: tl.constexpr = v_ptr.dtype.element_ty
        d2 = tl.arange(0, half)
        v_pair = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + kv // 2 + d2[None, :]
        odd = tl.zeros([BLOCK_G, half], tl.float32)
        mixed = tl.zeros([BLOCK_G, half], tl.float32)
    else:
        v_at = v_ptr + kv + d[None, :]
        mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_G], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        seen = key < end
        # The next block's pages are looked up while this one's keys are on their way.
        after_place = key_offsets(
            tables_ptr, key + BLOCK_N, columns, page_stride, token_stride, PAGE, WIDE
        )
        k = tl.load(k_at + place[:, None], mask=seen[:, None] & real[None, :], other=0.0)
        if PAIRED:
            pair = tl.load(
                v_pair + (place[:, None] >> 1),
                mask=seen[:, None] & (d2 < DIM // 2)[None, :],
                other=0,
            )
        else:
            v = tl.load(v_at + place[:, None], mask=seen[:, None] & real[None, :], other=0.0)
        score = tl.dot(q, tl.trans(to_float16(k)))
        if SCALED:
            # A value's scale is taken into its weight's exponent: at most 1, no weight is too large
            # or small for float16. The sum of the weights takes it out again.
            beside = kv // DIM + as_unsigned(place) // DIM
            k_scale = tl.load(k_scale_ptr + beside, mask=seen, other=1.0) * scale
            v_scale = tl.load(v_scale_ptr + beside, mask=seen, other=1.0)
            score = score * k_scale[None, :] + log2(v_scale)[None, :]
        else:
            score *= scale
        score = tl.where(seen[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        keep, add = tl.exp2(top - new), tl.exp2(score - new[:, None])
        if SCALED:
            mass = mass * keep + tl.sum(add * (1.0 / v_scale)[None, :], axis=1)
        else:
            mass = mass * keep + tl.sum(add, axis=1)
        if PAIRED:
            even_v, odd_v = unpack_pair(pair, held)
            add = add.to(tl.float16)
            mixed = tl.dot(add, even_v, mixed * keep[:, None])
            odd = tl.dot(add, odd_v, odd * keep[:, None])
        else:
            v = to_float16(v)
            mixed = tl.dot(add.to(v.dtype), v, mixed * keep[:, None])
        top = new
        place = after_place
    if PAIRED:
        mixed = tl.reshape(tl.join(mixed, odd), [BLOCK_G, BLOCK_D])
    if SPLITS == 1:
        out = mixed / tl.where(mass > 0.0, mass, 1.0)[:, None]
        target = out_ptr + (row * HEADS + head[:, None]) * DIM + d[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        part = (sequence * HEADS + head).to(tl.int64) * SPLITS + split
        tl.store(parts_ptr + part[:, None] * DIM + d[None, :], mixed, mask=mask)
        tl.store(sums_ptr + part * 2, top, mask=g < GROUP)
        tl.store(sums_ptr + part * 2 + 1, mass, mask=g < GROUP)


@triton.jit
def merge_splits(
    parts_ptr, sums_ptr, starts_ptr, lengths_ptr, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    after = tl.load(starts_ptr + sequence + 1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    begin, end = split_range(tl.load(lengths_ptr + sequence), s, WINDOW, SPLITS, LEAST)
    pdl_wait(PDL)
    part = (sequence * HEADS + head).to(tl.int64) * SPLITS + s
    # Read whether used or not, so that nothing waits for the length; what no split wrote is dropped
    # below.
    top = tl.load(sums_ptr + part * 2, mask=s < SPLITS, other=0.0)
    mass = tl.load(sums_ptr + part * 2 + 1, mask=s < SPLITS, other=0.0)
    inside = (s < SPLITS)[:, None] & (d < DIM)[None, :]
    mixed = tl.load(parts_ptr + part[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    used = (s < SPLITS) & (begin < end) & (after - row == 1)
    top = tl.where(used, top, -1.0e30)
    share = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(tl.where(used, mass * share, 0.0), axis=0)
    out = tl.sum(tl.where(used[:, None], mixed * share[:, None], 0.0), axis=0) / tl.where(
        total > 0.0, total, 1.0
    )
    if after - row == 1:
        tl.store(
            out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM
        )
