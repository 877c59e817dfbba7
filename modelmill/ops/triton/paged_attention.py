"""Attention over a paged KV cache: split along the context for decoding, tiled over the queries for prefill.

Launch sizes come from host integers alone (max_query, max_context, shapes), and the kernels read the lengths on the
device: a CUDA graph captured for a bound stays right for every shorter context. Decoding divides each sequence's
*own* context among its programs, so a short one under a large bound still spreads over the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import multiprocessors, power_of_two
from modelmill.ops.triton.early import enter, launch

LOG2E = 1.4426950408889634
LEAST_KEYS = 64  # keys a split must have before it is worth a program
LEAST_ALONE = 16  # the same where each head is a program of its own
MOST_SPLITS = 64


def supports(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> bool:
    """Head sizes 8 to 256, a power-of-two page, caches of one layout and of q's dtype."""
    _, _, page_size, dim = k_cache.shape
    layout = k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and q.stride(2) == 1
    sizes = 8 <= dim <= 256 and page_size & (page_size - 1) == 0
    return layout and sizes and k_cache.dtype == v_cache.dtype == q.dtype and q.shape[0] > 0


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference. Rows of padding sequences (context_len 0) are zero; rows of no sequence are undefined.

    out: filled and returned where given; with max_query 1 only in the rows of single queries, others are left alone.
    """
    tokens, heads, dim = q.shape
    if out is None:
        out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    tensors = (q, k_cache, v_cache, block_tables, query_start, context_lens, out)
    # Single queries among longer stretches would each fill one row of a prefill tile: they are decoded.
    mixed = max_query > 1 and block_tables.shape[0] > 1
    if max_query > 1:
        _prefill(tensors, (max_query, max_context), scale * LOG2E, window, mixed)
    if max_query == 1 or mixed:
        _decode(tensors, max_context, scale * LOG2E, window)
    return out


def _splits(pairs: int, each: int, keys: int, least: int, device: torch.device) -> int:
    """Programs that share one context: enough for ``each`` on every multiprocessor, none without keys."""
    wanted = triton.cdiv(each * multiprocessors(device), pairs)
    return max(1, min(wanted, triton.cdiv(keys, least), MOST_SPLITS))


def _decode(tensors: tuple[torch.Tensor, ...], max_context: int, scale: float, window: int | None) -> None:
    q, k, v, tables, starts, lengths, out = tensors
    _, kv_heads, page_size, dim = k.shape
    heads, batch = q.shape[1], tables.shape[0]
    # One query head a KV head leaves a tensor-core tile 1/16 full, and float32 must not be rounded to tf32:
    # both are multiplied and summed as vectors, a head each.
    shared = heads != kv_heads and q.dtype != torch.float32
    pairs, each, least = (batch * kv_heads, 4, LEAST_KEYS) if shared else (batch * heads, 8, LEAST_ALONE)
    keys = max_context if window is None else min(max_context, window)
    splits = _splits(pairs, each, keys, least, q.device)
    parts = sums = out
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((batch, heads, splits, 2), dtype=torch.float32, device=q.device)
    common = {"HEADS": heads, "DIM": dim, "WINDOW": window or 0, "SPLITS": splits, "LEAST": least}
    # The merge may take its place while the parts are being made; it waits there.
    first, last = launch(q.device, 1 if splits > 1 else batch), launch(q.device, batch)
    layout = {"GROUP": heads // kv_heads, "PAGE": page_size, "WIDE": _wide(k)}
    block_d = power_of_two(dim)
    strides = (tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), *k.stride()[:3])
    pointers = (q, k, v, tables, starts, lengths, out, parts, sums, scale)
    if shared:
        group = max(16, power_of_two(heads // kv_heads))
        _decode_groups[(kv_heads, batch, splits)](
            *pointers, *strides, BLOCK_G=group, BLOCK_N=LEAST_KEYS, BLOCK_D=max(16, block_d),
            num_warps=4, num_stages=3 if block_d <= 128 and splits <= 2 else 2, **common, **layout, **first,
        )  # fmt: skip
    else:
        block_n = (32 if splits == 1 else 16) * 128 // max(128, block_d * q.element_size() // 2)
        _decode_heads[(heads, batch, splits)](
            *pointers, *strides, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=2, **common, **layout, **first
        )
    if splits > 1:
        _merge[(heads, batch)](
            parts, sums, starts, lengths, out, BLOCK_S=power_of_two(splits), BLOCK_D=block_d, num_warps=4,
            **common, **last,
        )  # fmt: skip


def _wide(cache: torch.Tensor) -> bool:
    """Whether offsets in a cache need 64 bits; most do not, and 32-bit arithmetic is cheaper."""
    return cache.stride(0) * cache.shape[0] >= 1 << 31


def _prefill(
    tensors: tuple[torch.Tensor, ...], bounds: tuple[int, int], scale: float, window: int | None, mixed: bool
) -> None:
    q, k, v, tables, starts, lengths, out = tensors
    _, kv_heads, page_size, dim = k.shape
    heads, batch = q.shape[1], tables.shape[0]
    block_d = max(16, power_of_two(dim))
    block_m, block_n, warps, stages, registers = _tiling(bounds, heads * batch, block_d, q)
    # Sequence b's tiles begin at starts[b] // block_m + b: no more than these in all, whatever the lengths.
    tiles = q.shape[0] // block_m + batch
    _prefill_tiles[(heads, tiles)](
        q, k, v, tables, starts, lengths, out, scale,
        batch, tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), *k.stride()[:3],
        HEADS=heads, GROUP=heads // kv_heads, DIM=dim, PAGE=page_size, WIDE=_wide(k), WINDOW=window or 0,
        MIXED=mixed, BLOCK_B=16 if batch <= 16 else max(256, power_of_two(batch)),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip


def _tiling(
    bounds: tuple[int, int], pairs: int, block_d: int, q: torch.Tensor
) -> tuple[int, int, int, int, int | None]:
    """(queries, keys, warps, stages, most registers) of a prefill tile, measured on an H200."""
    max_query, max_context = bounds
    if q.dtype == torch.float32:
        return (16, 16, 4, 1, None) if block_d > 128 else (32, 32, 4, 1, None)
    if max_query <= 16:
        return 16, 64, 4, 3 if block_d <= 128 else 2, None
    # Tiles of 128 queries read the keys half as often, but need work enough to be spread evenly.
    tiles = triton.cdiv(max_query, 128) * pairs
    even = tiles >= 4 * multiprocessors(q.device) or max_context >= 2 * max_query
    if block_d > 128:
        return 64, 64, 8, 2, None
    if max_query <= 64 or not even:
        return 64, 64, 4, 3, None
    # 128 registers let two programs share a multiprocessor: one's softmax hides behind the other's products.
    return 128, 64, 8, 2, 128


@triton.jit
def _span(length, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Keys [begin, end) of a split; empty where the context has fewer blocks than there are splits."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if SPLITS == 1:
        return first, length
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), LEAST) * LEAST
    begin = first + split * share
    return begin, tl.minimum(begin + share, length)


@triton.jit
def _places(tables_ptr, key, columns, page_stride, token_stride, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of keys in the cache, in elements.

    Clamped to the row of the table instead of masked: the address then waits for nothing but the table. What a
    column past the context names is computed, and never read.
    """
    page = tl.load(tables_ptr + tl.minimum(key // PAGE, columns - 1))
    if WIDE:
        page = page.to(tl.int64)
    return page * page_stride + (key % PAGE) * token_stride


@triton.jit(do_not_specialize=["columns", "table_stride"])
def _decode_heads(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr, parts_ptr, sums_ptr, scale,
    columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, WIDE: tl.constexpr, LEAST: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    after = tl.load(starts_ptr + sequence + 1)
    begin, end = _span(tl.load(lengths_ptr + sequence), split, WINDOW, SPLITS, LEAST)
    tables_ptr += sequence * table_stride
    kv = (head // GROUP).to(tl.int64) * head_stride
    enter(EARLY)
    if after - row != 1:
        return
    if SPLITS > 1 and begin >= end:  # the merge counts the splits that have keys
        return
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    real = d < DIM
    q = tl.load(q_ptr + row * q_stride + head * q_head + d, mask=real, other=0.0).to(tl.float32) * scale
    k_at = k_ptr + kv + d[None, :]
    v_at = v_ptr + kv + d[None, :]
    # Each of the BLOCK_N lanes keeps its own softmax: inside the loop nothing is reduced across keys.
    top = tl.full([BLOCK_N], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    place = _places(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        seen = key < end
        # The next block's pages are looked up while this one's keys are on their way.
        after_place = _places(tables_ptr, key + BLOCK_N, columns, page_stride, token_stride, PAGE, WIDE)
        k = tl.load(k_at + place[:, None], mask=seen[:, None] & real[None, :], other=0.0)
        v = tl.load(v_at + place[:, None], mask=seen[:, None] & real[None, :], other=0.0)
        score = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], axis=1), float("-inf"))
        new = tl.maximum(top, score)
        keep, add = tl.exp2(top - new), tl.exp2(score - new)
        mass = mass * keep + add
        mixed = mixed * keep[:, None] + add[:, None] * v.to(tl.float32)
        top = new
        place = after_place
    highest = tl.max(top, axis=0)
    share = tl.exp2(top - highest)
    total = tl.sum(mass * share, axis=0)
    out = tl.sum(mixed * share[:, None], axis=0)
    if SPLITS == 1:
        out = out / tl.where(total > 0.0, total, 1.0)
        tl.store(out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=real)
    else:
        part = (sequence * HEADS + head).to(tl.int64) * SPLITS + split
        tl.store(parts_ptr + part * DIM + d, out, mask=real)
        tl.store(sums_ptr + part * 2, highest)
        tl.store(sums_ptr + part * 2 + 1, total)


@triton.jit(do_not_specialize=["columns", "table_stride"])
def _decode_groups(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr, parts_ptr, sums_ptr, scale,
    columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, WIDE: tl.constexpr, LEAST: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    after = tl.load(starts_ptr + sequence + 1)
    begin, end = _span(tl.load(lengths_ptr + sequence), split, WINDOW, SPLITS, LEAST)
    tables_ptr += sequence * table_stride
    kv = kv_head.to(tl.int64) * head_stride
    enter(EARLY)
    if after - row != 1:
        return
    if SPLITS > 1 and begin >= end:
        return
    n, d, g = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G)
    real = d < DIM
    head = kv_head * GROUP + g
    mask = (g < GROUP)[:, None] & real[None, :]
    q = tl.load(q_ptr + row * q_stride + head[:, None] * q_head + d[None, :], mask=mask, other=0.0)
    k_at = k_ptr + kv + d[None, :]
    v_at = v_ptr + kv + d[None, :]
    top = tl.full([BLOCK_G], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    place = _places(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        seen = key < end
        # The next block's pages are looked up while this one's keys are on their way.
        after_place = _places(tables_ptr, key + BLOCK_N, columns, page_stride, token_stride, PAGE, WIDE)
        k = tl.load(k_at + place[:, None], mask=seen[:, None] & real[None, :], other=0.0)
        v = tl.load(v_at + place[:, None], mask=seen[:, None] & real[None, :], other=0.0)
        score = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(score, axis=1))
        keep, add = tl.exp2(top - new), tl.exp2(score - new[:, None])
        mass = mass * keep + tl.sum(add, axis=1)
        mixed = tl.dot(add.to(v.dtype), v, mixed * keep[:, None])
        top = new
        place = after_place
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
def _merge(
    parts_ptr, sums_ptr, starts_ptr, lengths_ptr, out_ptr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1)
    row = tl.load(starts_ptr + sequence).to(tl.int64)
    after = tl.load(starts_ptr + sequence + 1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    begin, end = _span(tl.load(lengths_ptr + sequence), s, WINDOW, SPLITS, LEAST)
    enter(EARLY)
    part = (sequence * HEADS + head).to(tl.int64) * SPLITS + s
    # Read whether used or not, so that nothing waits for the length; what no split wrote is dropped below.
    top = tl.load(sums_ptr + part * 2, mask=s < SPLITS, other=0.0)
    mass = tl.load(sums_ptr + part * 2 + 1, mask=s < SPLITS, other=0.0)
    inside = (s < SPLITS)[:, None] & (d < DIM)[None, :]
    mixed = tl.load(parts_ptr + part[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    used = (s < SPLITS) & (begin < end) & (after - row == 1)
    top = tl.where(used, top, -1.0e30)
    share = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(tl.where(used, mass * share, 0.0), axis=0)
    out = tl.sum(tl.where(used[:, None], mixed * share[:, None], 0.0), axis=0) / tl.where(total > 0.0, total, 1.0)
    if after - row == 1:
        tl.store(out_ptr + (row * HEADS + head) * DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["batch", "columns", "table_stride"])
def _prefill_tiles(
    q_ptr, k_ptr, v_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr, scale,
    batch, columns, table_stride, q_stride, q_head, page_stride, head_stride, token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr,
    WINDOW: tl.constexpr, MIXED: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The last queries have the most keys: started first for all heads, they do not end last.
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.arange(0, BLOCK_B)
    first = tl.load(starts_ptr + b, mask=b < batch, other=0) // BLOCK_M + b
    sequence = tl.sum(((first <= tile) & (b < batch)).to(tl.int32), axis=0) - 1
    row = tl.load(starts_ptr + sequence)
    block = tile - (row // BLOCK_M + sequence)
    count = tl.load(starts_ptr + sequence + 1) - row
    if block * BLOCK_M >= count or (MIXED and count == 1):
        return
    m, n, d = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    history = tl.load(lengths_ptr + sequence) - count  # negative for padding: no key is visited then
    at = (row + m).to(tl.int64)
    mask = (m < count)[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + at[:, None] * q_stride + head * q_head + d[None, :], mask=mask, other=0.0)
    kv = (head // GROUP).to(tl.int64) * head_stride
    tables_ptr += sequence * table_stride
    position = history + m
    end = history + tl.minimum((block + 1) * BLOCK_M, count)
    plain = (history + block * BLOCK_M + 1) // BLOCK_N * BLOCK_N  # keys before this one are seen by every query
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(history + block * BLOCK_M + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        plain = begin
    top = tl.full([BLOCK_M], -1.0e30, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    place = _places(tables_ptr, begin + n, columns, page_stride, token_stride, PAGE, WIDE)
    for start in range(begin, plain, BLOCK_N):
        after = _places(tables_ptr, start + BLOCK_N + n, columns, page_stride, token_stride, PAGE, WIDE)
        top, mass, mixed = _attend(
            q, k_ptr + kv, v_ptr + kv, place, start + n, end, position, top, mass, mixed, scale,
            False, 0, DIM, BLOCK_D,
        )  # fmt: skip
        place = after
    for start in range(tl.maximum(plain, begin), end, BLOCK_N):
        after = _places(tables_ptr, start + BLOCK_N + n, columns, page_stride, token_stride, PAGE, WIDE)
        top, mass, mixed = _attend(
            q, k_ptr + kv, v_ptr + kv, place, start + n, end, position, top, mass, mixed, scale,
            True, WINDOW, DIM, BLOCK_D,
        )  # fmt: skip
        place = after
    out = mixed / tl.where(mass > 0.0, mass, 1.0)[:, None]
    target = out_ptr + (at[:, None] * HEADS + head) * DIM + d[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q, k_ptr, v_ptr, place, key, end, position, top, mass, mixed, scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of keys at ``place`` in the cache: the running maximum, sum and mixture after it."""
    d = tl.arange(0, BLOCK_D)
    at = place[:, None] + d[None, :]
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
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        allowed = key[None, :] <= position[:, None]
        if WINDOW > 0:
            allowed = allowed & (key[None, :] > position[:, None] - WINDOW)
        score = tl.where(allowed, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, axis=1) * scale)
    keep, add = tl.exp2(top - new), tl.exp2(score * scale - new[:, None])
    mass = mass * keep + tl.sum(add, axis=1)
    mixed = tl.dot(add.to(v.dtype), v, mixed * keep[:, None], input_precision="ieee")
    return new, mass, mixed
