"""Latent attention (MLA) over a paged cache: all query heads read one KV head, values are in it.

Computes: out[T, heads · value_dim] = softmax(q[T, heads, D] · Kᵀ) · V, causal, where V is the first
    value_dim channels of K (DeepSeek-V2, arXiv:2405.04434, with absorbed up-projections); and the
    merge of splits
Dtypes: q and out bfloat16, float16 or float32; pages of q's dtype, int8 or e4m3 with a float32
    scale per token
Layout: pages [pages, 1, page_size, D]; int32 page tables
Range: value_dim 16 … 512, up to 64 channels beside it, page_size a power of two
Technique: split-KV (up to 64 splits), tensor cores, PDL
Ops: paged_attention

A program takes a tile of rows, of which each is a query and a head: of one query in decode, of
several queries of a prompt. It reads a tile of keys once, and multiplies it twice. Programs that
differ in their rows alone follow each other in the grid, so that they share the keys in the second
level cache. Splits are a number at run time: a kernel serves every batch and every context.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.triton.attention.online_softmax import combine_partials, softmax_weights
from modelmill.ops.triton.attention.paged_decode import load_sequence_bounds, offsets_as_unsigned
from modelmill.ops.triton.attention.score_mods import LOG2E
from modelmill.ops.triton.common.device import (
    has_wgmma,
    max_shared_bytes,
    next_power_of_two,
    sm_count,
)
from modelmill.ops.triton.common.dtype_convert import log2, to_float32, widen_8bit_to_float16
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_SPLITS = 64
MAX_VALUE_DIM, MAX_ROTARY_DIM = 512, 64  # channels that are values, and the others
MERGE_CHANNELS = 64  # that a program of the merge computes
PDL_PLACEHOLDER_ROWS = 2  # one variant for every batch
WGMMA_TILE_ROWS = 64  # of a tile whose operands wgmma reads from shared memory


class LatentLaunchConfig(NamedTuple):
    """How a step is divided.

    Attributes:
        rows: Queries times heads of a tile.
        keys: Keys of a block.
        warps: Warps of a program.
        stages: Blocks of keys in shared memory.
        per_sm: Programs that share an SM.
        split_keys: Minimum keys of a split: enough to outweigh the partial results of its rows.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_sm: int
    split_keys: int


def prefill(
    inputs: PagedAttentionInputs, out: torch.Tensor | None = None, *, mixed: bool = False
) -> torch.Tensor:
    """Fill the rows of prompts and, where not ``mixed``, those of single queries.

    Rows of padding sequences (context_len 0) are zero; rows that belong to no sequence are
    undefined.
    """
    return _attend_sequences(inputs, out, inputs.max_query, 2 if mixed else 1)


def decode(inputs: PagedAttentionInputs, out: torch.Tensor | None = None) -> torch.Tensor:
    """Fill the rows of single queries, and leave the others alone."""
    return _attend_sequences(inputs, out, 1, 1)


def _attend_sequences(
    inputs: PagedAttentionInputs, out: torch.Tensor | None, max_query: int, min_query: int
) -> torch.Tensor:
    """Fill the rows of sequences of ``min_query`` to ``max_query`` queries."""
    q, k, _, tables, starts, lengths = inputs[:6]
    (tokens, heads, dim), batch, value_dim = q.shape, tables.shape[0], inputs.output_dim
    if out is None:
        out = torch.empty((tokens, heads * value_dim), dtype=q.dtype, device=q.device)
    tile = _select_latent_launch_config(q, k, max_query)
    rows = max_query * heads  # of a sequence, at most
    blocks = -(-rows // tile.rows)
    splits = _num_splits(tile, blocks * batch, inputs.max_context, q.device)
    # Partial results of these rows alone: a step may have single queries beside a long prompt. In
    # float32 also where there are none, so that there is one variant of the kernel.
    shape = batch * rows if splits > 1 else 0, splits
    parts = torch.empty((*shape, value_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((*shape, 2), dtype=torch.float32, device=q.device)
    scale = q if inputs.k_scale is None else inputs.k_scale
    pdl = pdl_launch_options(q.device, PDL_PLACEHOLDER_ROWS)
    counts: dict[str, Any] = {
        "HEADS": heads, "VALUE_DIM": value_dim, "MIN_QUERY": min_query, "MAX_QUERY": max_query > 1,
    }  # fmt: skip
    paged_latent_kernel[(blocks, batch, splits)](
        q, k, scale, tables, starts, lengths, out, parts, sums,
        inputs.scale * LOG2E, tables.shape[1], tables.stride(0), splits, rows,
        q.stride(0), q.stride(1), k.stride(0), k.stride(2),
        DIM=dim, PAGE=k.shape[2], WIDE=k.stride(0) * k.shape[0] >= 1 << 31,
        SCALED=scale is not q, SPLIT_KEYS=tile.split_keys, DIRECT=tile.rows == WGMMA_TILE_ROWS,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_V=_pad_tile_channels(value_dim),
        BLOCK_R=_pad_tile_channels(dim - value_dim), num_warps=tile.warps, num_stages=tile.stages,
        **counts, **pdl,
    )  # fmt: skip
    if splits > 1:
        chunks = -(-value_dim // MERGE_CHANNELS)
        merge_latent_splits_kernel[(heads * chunks, batch, max_query)](
            parts, sums, starts, out, splits, rows,
            BLOCK_S=MAX_SPLITS, BLOCK_D=MERGE_CHANNELS, num_warps=4, **counts, **pdl,
        )  # fmt: skip
    return out


def _pad_tile_channels(channels: int) -> int:
    """Channels of a tile: a power of two that tensor cores take."""
    return max(16, next_power_of_two(channels))


def _num_splits(tile: LatentLaunchConfig, programs: int, keys: int, device: torch.device) -> int:
    """Programs that share a context: as many as fit at once, none without keys."""
    splits = tile.per_sm * sm_count(device) // programs
    return max(1, min(splits, -(-keys // tile.split_keys), MAX_SPLITS))


def _select_latent_launch_config(
    q: torch.Tensor, k: torch.Tensor, max_query: int
) -> LatentLaunchConfig:
    """The tile of a step, as measured on an H200; else the largest that compiles with few spills.

    Of n stages Triton keeps n − 1 blocks in shared memory: with 3 of them a block is loaded while
    another is multiplied. Blocks of 64 keys for wgmma are so large that 2 are faster.
    """
    shared = max_shared_bytes(q.device)
    if q.dtype == torch.float32:
        return LatentLaunchConfig(16, 16, 4, 1, 2 if shared >= 160 << 10 else 1, 64)
    rows, same = max_query * q.shape[1], k.dtype == q.dtype
    # Queries beside the accumulator are too many registers, unless wgmma reads them from shared
    # memory. Tiles of 8-bit pages are then converted once, not by each warp for its operands.
    if rows > 32 and has_wgmma(q.device):
        return LatentLaunchConfig(WGMMA_TILE_ROWS, 64, 8, 2, 1, 128)
    if rows > 16:  # 110 KiB, or 72 with one block or 8-bit pages
        return LatentLaunchConfig(32, 32, 8, 2 if same and shared < 112 << 10 else 3, 1, 64)
    # 91 KiB, or 54 with 8-bit pages
    per_sm = 2 if shared >= (184 << 10 if same else 110 << 10) else 1
    return LatentLaunchConfig(16, 32, 4, 3, per_sm, 64)


@triton.jit
def _load_page_numbers(tables_ptr, key, columns, PAGE: tl.constexpr):
    """Pages of keys; clamped instead of masked, so that it depends only on the table."""
    return tl.load(tables_ptr + tl.minimum(key // PAGE, columns - 1))


@triton.jit
def _key_offsets(page, key, page_stride, token_stride, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """Offsets of keys in the cache, in elements; those beyond the context are not loaded."""
    if WIDE:
        page = page.to(tl.int64)
    return page * page_stride + (key % PAGE) * token_stride


@triton.jit(do_not_specialize=["columns", "table_stride", "splits", "rows"])
def paged_latent_kernel(
    q_ptr, k_ptr, k_scale_ptr, tables_ptr, starts_ptr, lengths_ptr, out_ptr, parts_ptr, sums_ptr,
    scale, columns, table_stride, splits, rows, q_stride, q_head, page_stride, token_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDE: tl.constexpr, SCALED: tl.constexpr, MIN_QUERY: tl.constexpr, MAX_QUERY: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows (queries times heads) of a sequence over one split of their keys.

    rows: of a sequence in the partial results. MIN_QUERY: least queries of the sequences that are
    computed. MAX_QUERY: whether they may have more than one. DIRECT: queries are multiplied as they
    are loaded, so that wgmma reads them from shared memory; 8-bit keys become of their dtype, which
    is exact. Else keys become float16, which costs less, and queries of bfloat16 have to fit.
    """
    block, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, row_end, length = load_sequence_bounds(starts_ptr, lengths_ptr, sequence)
    count = (row_end - row).to(tl.int32)
    tables_ptr += sequence * table_stride
    m, n = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    query, head = m // HEADS, m % HEADS
    position = length - count + query
    last = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // HEADS, count - 1)
    context = length - count + last + 1  # keys of the last query; negative for padding
    share = tl.cdiv(tl.cdiv(context, splits), SPLIT_KEYS) * SPLIT_KEYS
    begin = split * share
    end = tl.minimum(begin + share, context)
    page = _load_page_numbers(tables_ptr, tl.maximum(begin, 0) + n, columns, PAGE)
    pdl_wait_and_trigger(PDL)
    if count < MIN_QUERY:
        return
    if count > 1 and not MAX_QUERY:
        return
    if block * BLOCK_M >= count * HEADS:
        return
    inside = m < count * HEADS
    part = (sequence.to(tl.int64) * rows + m) * splits + split
    if splits > 1 and begin >= end:  # the merge does not read what has no weight
        tl.store(sums_ptr + part * 2, tl.full([BLOCK_M], -1.0e30, tl.float32), mask=inside)
        tl.store(sums_ptr + part * 2 + 1, tl.zeros([BLOCK_M], tl.float32), mask=inside)
        return
    v, r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    q_at = q_ptr + (row + query)[:, None] * q_stride + head[:, None] * q_head
    v_valid, r_valid = v < VALUE_DIM, r < DIM - VALUE_DIM
    q_v = tl.load(q_at + v[None, :], mask=inside[:, None] & v_valid[None, :], other=0.0)
    q_r = tl.load(q_at + VALUE_DIM + r[None, :], mask=inside[:, None] & r_valid[None, :], other=0.0)
    if SCALED and not DIRECT:
        q_v, q_r = q_v.to(tl.float32), q_r.to(tl.float32)
        if q_ptr.dtype.element_ty != tl.float32:
            amax = tl.maximum(tl.max(tl.abs(q_v)), tl.max(tl.abs(q_r)))
            amax = tl.maximum(amax, 1.0e-30)
            q_v, q_r = (q_v / amax).to(tl.float16), (q_r / amax).to(tl.float16)
            scale *= amax
    k_at = k_ptr + v[None, :]
    rotary_at = k_ptr + VALUE_DIM + r[None, :]
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    exp_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        valid = key < end
        # The next block's pages are looked up while this block's keys are loaded. What is carried
        # over is the load itself: Triton would look up offsets only in front of their own keys.
        next_page = _load_page_numbers(tables_ptr, key + BLOCK_N, columns, PAGE)
        offsets = _key_offsets(page, key, page_stride, token_stride, PAGE, WIDE)
        latent = tl.load(k_at + offsets[:, None], mask=valid[:, None] & v_valid[None, :], other=0.0)
        rotary = tl.load(
            rotary_at + offsets[:, None], mask=valid[:, None] & r_valid[None, :], other=0.0
        )
        if DIRECT:
            latent, rotary = (
                widen_8bit_to_float16(latent).to(q_v.dtype),
                widen_8bit_to_float16(rotary).to(q_v.dtype),
            )
        elif SCALED and q_v.dtype == tl.float32:
            latent, rotary = to_float32(latent), to_float32(rotary)
        else:
            latent, rotary = widen_8bit_to_float16(latent), widen_8bit_to_float16(rotary)
        score = tl.dot(q_v, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_r, tl.trans(rotary), score, input_precision="ieee") * scale
        if SCALED:
            # As in paged_decode: the scale of a value is added to the exponent of its weight, and
            # the sum of the weights divides it out again.
            scale_index = offsets_as_unsigned(offsets) // DIM
            k_scale = tl.load(k_scale_ptr + scale_index, mask=valid, other=1.0)
            score = score * k_scale[None, :] + log2(k_scale)[None, :]
        allowed = valid[None, :]
        if MAX_QUERY:
            allowed = allowed & (key[None, :] <= position[:, None])
        score = tl.where(allowed, score, float("-inf"))
        new_max, rescale, weight = softmax_weights(score, row_max)
        if SCALED:
            exp_sum = exp_sum * rescale + tl.sum(weight * (1.0 / k_scale)[None, :], axis=1)
        else:
            exp_sum = exp_sum * rescale + tl.sum(weight, axis=1)
        acc = tl.dot(
            weight.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee"
        )
        row_max = new_max
        page = next_page
    mask = inside[:, None] & v_valid[None, :]
    if splits == 1:
        out = acc / tl.where(exp_sum > 0.0, exp_sum, 1.0)[:, None]
        at = (row + query) * HEADS + head
        target = out_ptr + at[:, None] * VALUE_DIM + v[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(parts_ptr + part[:, None] * VALUE_DIM + v[None, :], acc, mask=mask)
        tl.store(sums_ptr + part * 2, row_max, mask=inside)
        tl.store(sums_ptr + part * 2 + 1, exp_sum, mask=inside)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge_latent_splits_kernel(
    parts_ptr, sums_ptr, starts_ptr, out_ptr, splits, rows,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, MIN_QUERY: tl.constexpr, MAX_QUERY: tl.constexpr,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of all splits: BLOCK_D channels of a query and a head."""
    head, chunk = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    sequence, query = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + sequence).to(tl.int64)
    count = tl.load(starts_ptr + sequence + 1) - first
    pdl_wait_and_trigger(PDL)
    if count < MIN_QUERY or query >= count:
        return
    if count > 1 and not MAX_QUERY:
        return
    s, d = tl.arange(0, BLOCK_S), chunk * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (first + query) * HEADS + head
    part = (sequence.to(tl.int64) * rows + query * HEADS + head) * splits + s
    split_max = tl.load(sums_ptr + part * 2, mask=s < splits, other=-1.0e30)
    exp_sum = tl.load(sums_ptr + part * 2 + 1, mask=s < splits, other=0.0)
    used = (exp_sum > 0.0)[:, None] & (d < VALUE_DIM)[None, :]
    acc = tl.load(parts_ptr + part[:, None] * VALUE_DIM + d[None, :], mask=used, other=0.0)
    out, _, total = combine_partials(acc, split_max, exp_sum)
    out = out / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + at * VALUE_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < VALUE_DIM)
