"""Attention over a paged KV cache: split along the context for decoding, tiled over the queries for
prefill.

The kernels are in paged_decode and paged_prefill.

Launch sizes come from host integers alone (max_query, max_context, shapes), and the kernels read
the lengths on the device: a CUDA graph captured for a bound stays right for every shorter context.
Decoding divides each sequence's
*own* context among its programs, so a short one under a large bound still spreads over the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from modelmill.ops.triton import paged_decode, paged_prefill
from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import max_shared_bytes, power_of_two, sm_count, supports_fp8
from modelmill.ops.triton.fast_launch import CachedLauncher
from modelmill.ops.triton.pdl import pdl_launch_options

LOG2E = 1.4426950408889634
MIN_SPLIT_KEYS = 64  # keys a split must have before it is worth a program
MIN_SPLIT_KEYS_PER_HEAD = 16  # the same where each head is a program of its own
MAX_SPLITS = 64
SPARE_PREFILL_TILES = 8  # prompts beside single queries for whose last tiles there are programs


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
    """Head sizes 8 to 256, a power-of-two page, caches of one layout, of q's dtype or packed 8 bits
    with scales.
    """
    _, _, page_size, dim = k_cache.shape
    layout = k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and q.stride(2) == 1
    sizes = 8 <= dim <= 256 and page_size & (page_size - 1) == 0
    if k_scale is None or v_scale is None:
        held = k_cache.dtype == q.dtype
    else:
        packed = k_cache.is_contiguous() and k_scale.is_contiguous() and v_scale.is_contiguous()
        known = k_cache.dtype is torch.int8 or (
            k_cache.dtype is torch.float8_e4m3fn and supports_fp8(q.device)
        )
        held = packed and known
    return layout and sizes and held and k_cache.dtype == v_cache.dtype and q.shape[0] > 0


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
    include_decode: bool = True,
) -> torch.Tensor:
    """As the reference. Rows of padding sequences (context_len 0) are zero; rows of no sequence are
    undefined.

    out: filled and returned where given; with max_query 1 only in the rows of single queries,
    others are left alone. include_decode: whether single queries beside longer stretches are filled
    in.
    """
    tokens, heads, dim = q.shape
    if out is None:
        out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    scales = (q, q) if k_scale is None or v_scale is None else (k_scale, v_scale)
    tensors = (q, k_cache, v_cache, *scales, block_tables, query_start, context_lens, out)
    # Single queries among longer stretches would each fill one row of a prefill tile: they are
    # decoded.
    mixed = max_query > 1 and block_tables.shape[0] > 1
    if max_query > 1:
        _prefill(tensors, (max_query, max_context), scale * LOG2E, window, mixed)
    if max_query == 1 or (mixed and include_decode):
        _decode(tensors, max_context, scale * LOG2E, window)
    return out


_prefill_launcher = CachedLauncher(paged_prefill.prefill_tiles)


class _DecodeLaunchConfig(NamedTuple):
    """How a decode step is divided. group_heads: the query heads of a KV head go together.

    tile: keys at once, warps, stages. splits: programs that share a context. min_keys: keys that
    each of them has, where it has any.
    """

    group_heads: bool
    tile: tuple[int, int, int]
    splits: int
    min_keys: int


def specializations(
    q: torch.Tensor, k_cache: torch.Tensor, max_sequences: int, max_context: int, window: int | None
) -> list[tuple[int, int]]:
    """(sequences, bound on their context) of a decode step for each form of the kernels that such
    steps may take.

    Every form is compiled when it is first met, and that takes a part of a second. max_sequences,
    max_context: sequences of a step, tokens of one. q, k_cache, window: as for ``run``.
    """
    found: dict[tuple[_DecodeLaunchConfig, bool], tuple[int, int]] = {}
    max_context = max_context if window is None else min(max_context, window)
    for batch in range(1, max_sequences + 1):
        widest = _decode_config(q, k_cache, batch, max_context)
        for count in range(1, widest.splits + 1):
            keys = min(count * widest.min_keys, max_context)
            found.setdefault((_decode_config(q, k_cache, batch, keys), batch == 1), (batch, keys))
    return list(found.values())


def _decode_config(q: torch.Tensor, k: torch.Tensor, batch: int, keys: int) -> _DecodeLaunchConfig:
    heads, kv_heads = q.shape[1], k.shape[1]
    # One query head a KV head leaves a tensor-core tile 1/16 full, and float32 must not be rounded
    # to tf32:
    # both are multiplied and summed as vectors, a head each.
    if heads != kv_heads and q.dtype != torch.float32:
        at_once, warps, stages, each = _group_decode_tile(k, q, batch * kv_heads)
        splits = _num_splits(batch * kv_heads, each, keys, MIN_SPLIT_KEYS, q.device)
        return _DecodeLaunchConfig(True, (at_once, warps, stages), splits, MIN_SPLIT_KEYS)
    return _DecodeLaunchConfig(
        False,
        (0, 2, 0),
        _num_splits(batch * heads, 8, keys, MIN_SPLIT_KEYS_PER_HEAD, q.device),
        MIN_SPLIT_KEYS_PER_HEAD,
    )


def _num_splits(
    pairs: int, programs_per_sm: int, keys: int, min_keys: int, device: torch.device
) -> int:
    """Programs that share one context: at most ``programs_per_sm`` on every multiprocessor, none
    without keys.

    Rounded down: one program more than there is room for waits for a place, and all others for it.
    """
    wanted = programs_per_sm * sm_count(device) // pairs
    return max(1, min(wanted, -(-keys // min_keys), MAX_SPLITS))


def _decode(
    tensors: tuple[torch.Tensor, ...], max_context: int, scale: float, window: int | None
) -> None:
    q, k, v, k_scale, v_scale, tables, starts, lengths, out = tensors
    _, kv_heads, page_size, dim = k.shape
    heads, batch = q.shape[1], tables.shape[0]
    keys = max_context if window is None else min(max_context, window)
    shared, (keys_at_once, warps, stages), splits, least = _decode_config(q, k, batch, keys)
    parts = sums = out
    if splits > 1:
        parts = torch.empty((batch, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((batch, heads, splits, 2), dtype=torch.float32, device=q.device)
    common = {"HEADS": heads, "DIM": dim, "WINDOW": window or 0, "SPLITS": splits, "LEAST": least}
    # The merge may take its place while the parts are being made; it waits there.
    first, last = (
        pdl_launch_options(q.device, 1 if splits > 1 else batch),
        pdl_launch_options(q.device, batch),
    )
    layout = {
        "GROUP": heads // kv_heads,
        "PAGE": page_size,
        "WIDE": _needs_int64(k),
        "SCALED": k_scale is not q,
    }
    block_d = power_of_two(dim)
    strides = (tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), *k.stride()[:3])
    pointers = (q, k, v, k_scale, v_scale, tables, starts, lengths, out, parts, sums, scale)
    if shared:
        group = max(16, power_of_two(heads // kv_heads))
        paged_decode.decode_head_groups[(kv_heads, batch, splits)](
            *pointers, *strides, BLOCK_G=group, BLOCK_N=keys_at_once, BLOCK_D=max(16, block_d),
            PAIRED=k_scale is not q and dim % 2 == 0 and block_d >= 32,
            num_warps=warps, num_stages=stages, **common, **layout, **first,
        )  # fmt: skip
    else:
        block_n = max(1, 16 * 128 // max(128, block_d * q.element_size() // 2))
        paged_decode.decode_heads[(heads, batch, splits)](
            *pointers,
            *strides,
            TURNS=2,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            num_warps=warps,
            **common,
            **layout,
            **first,
        )
    if splits > 1:
        paged_decode.merge_splits[(heads, batch)](
            parts, sums, starts, lengths, out, BLOCK_S=power_of_two(splits), BLOCK_D=block_d,
            num_warps=4,
            **common, **last,
        )  # fmt: skip


def _group_decode_tile(k: torch.Tensor, q: torch.Tensor, pairs: int) -> tuple[int, int, int, int]:
    """(keys at once, warps, stages, programs a multiprocessor) of decoding in groups, measured on
    an H200.
    """
    if k.shape[3] > 128 or q.shape[1] > 16 * k.shape[1]:
        return MIN_SPLIT_KEYS, 4, 2, 4
    if k.dtype == q.dtype:
        return 32, 1, 2, 6
    # int8 is bound by its conversion: with programs enough, those of one warp need not wait for
    # each other.
    if k.dtype == torch.int8 and pairs >= 2 * sm_count(q.device):
        return 32, 1, 3, 8
    return MIN_SPLIT_KEYS, 2, 3, 4


def _needs_int64(cache: torch.Tensor) -> bool:
    """Whether offsets in a cache need 64 bits; most do not, and 32-bit arithmetic is cheaper."""
    return cache.stride(0) * cache.shape[0] >= 1 << 31


def _prefill(
    tensors: tuple[torch.Tensor, ...],
    bounds: tuple[int, int],
    scale: float,
    window: int | None,
    mixed: bool,
) -> None:
    q, k, _, k_scale, _, tables, *_ = tensors
    _, kv_heads, page_size, dim = k.shape
    heads, batch = q.shape[1], tables.shape[0]
    block_d = max(16, power_of_two(dim))
    block_m, block_n, warps, stages, registers = _prefill_tile(bounds, heads * batch, block_d, q, k)
    # Each sequence has one tile that is not full, or less. Where most of them are single queries,
    # which have none, a program for each would find nothing to do; if there are more tiles after
    # all, programs take several.
    programs = q.shape[0] // block_m + (min(batch, SPARE_PREFILL_TILES) if mixed else batch)
    fixed = (q.stride(0), q.stride(1), *k.stride()[:3])
    scaled, sequences = k_scale is not q, 16 if batch <= 16 else max(256, power_of_two(batch))
    sizes = (
        heads,
        heads // kv_heads,
        dim,
        page_size,
        _needs_int64(k),
        window or 0,
        scaled,
        mixed,
        sequences,
    )
    _prefill_launcher(
        (heads, programs, 1),
        tensors,
        (scale, batch, tables.shape[1], tables.stride(0), *fixed),
        fixed,
        (*sizes, block_m, block_n, block_d),
        {"num_warps": warps, "num_stages": stages, "maxnreg": registers},
    )


def _prefill_tile(
    bounds: tuple[int, int], pairs: int, block_d: int, q: torch.Tensor, k: torch.Tensor
) -> tuple[int, int, int, int, int | None]:
    """(queries, keys, warps, stages, most registers) of a prefill tile, measured on an H200."""
    max_query, max_context = bounds
    if q.dtype == torch.float32:
        return (16, 16, 4, 1, None) if block_d > 128 else (32, 32, 4, 1, None)
    if max_query <= 16:
        return 16, 64, 4, 3 if block_d <= 128 else 2, None
    if k.element_size() == 1 and block_d <= 128:
        # The conversion takes registers: wide tiles, each alone on a multiprocessor.
        if max_shared_bytes(q.device) < 160 << 10:
            return 64, 64, 4, 2, None
        return (64, 128, 4, 2, None) if max_query <= 64 else (128, 128, 8, 2, None)
    # Tiles of 128 queries read the keys half as often, but need work enough to be spread evenly.
    tiles = -(-max_query // 128) * pairs
    even = tiles >= 4 * sm_count(q.device) or max_context >= 2 * max_query
    if block_d > 128:
        return 64, 64, 8, 2, None
    if max_query <= 64 or not even:
        return 64, 64, 4, 3, None
    # 128 registers let two programs share a multiprocessor: one's softmax hides behind the other's
    # products.
    return 128, 64, 8, 2, 128
