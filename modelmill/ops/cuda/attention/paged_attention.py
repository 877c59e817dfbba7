"""Attention over a paged KV cache on Hopper: prefill (paged_attention.cu) and decode.

A step that mixes prompts and single queries is shared. The prefill kernel takes whole tiles of 128
queries, of which a single query would fill one row: paged_decode16 has those, or the variant behind
this one where that does not serve. Prompts that are too short for the tiles, or have pages of int8,
are left to the variant behind, and their step's single queries to paged_decode16 and paged_decode8.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import struct
from collections.abc import Callable

import torch

from modelmill.ops.cuda.attention import paged_decode8, paged_decode16
from modelmill.ops.cuda.attention.paged_decode import LOG2E, TYPES, supports_indices
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.paged_attention import PagedAttentionInputs

USES_FALLBACK = True
PREFILL_MIN_QUERIES = 64  # up to here half of a tile of 128 would be empty, or more
PREFILL_MIN_TOKENS = 128  # up to here starting the copies takes longer than all else
_TRITON = importlib.util.find_spec("triton") is not None
# Sizes of paged_attention.cu.
QUERIES = 128
KEYS = 128
STAGES = 2
THREADS = 384
MAX_SEQUENCES, PLAN_BYTES = 1024, 13 * 1024
# Keys and values of the heads that are served at the same time: what stays in an L2 cache of 50 MB
# beside all else.
L2_RESIDENT_BYTES = 32 << 20


def available(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = _prefill_macros(torch.bfloat16, 128, 16)
    reason = build.why_unavailable(device_type, "paged_attention", common)
    return reason or paged_decode8.available(device_type) or paged_decode16.available(device_type)


def supports(inputs: PagedAttentionInputs) -> bool:
    """Whether the kernels serve these operands.

    Prompts in 16 bits, heads of 64 or 128, packed caches with pages of 8 to 128 tokens, up to
    1,024 sequences.

    Of a step's single queries, alone or among prompts, what paged_decode8 and paged_decode16 serve.
    """
    q, k_cache, v_cache, block_tables, query_start, context_lens = inputs[:6]
    max_query, (k_scale, v_scale) = inputs.max_query, inputs[10:]
    indices = (block_tables, query_start, context_lens)
    if k_scale is None and _supports_prefill(q, k_cache, v_cache, indices, max_query):
        return True
    if max_query > 1 and (block_tables.shape[0] == 1 or not _TRITON):
        return False
    return _supports_decode(q, (k_cache, v_cache, k_scale, v_scale), indices)


def specializations(
    q: torch.Tensor, k_cache: torch.Tensor, max_sequences: int, max_context: int, window: int | None
) -> list[tuple[int, int]]:
    """Return (sequences, context bound) of decode steps that cover every kernel config.

    Each is compiled when a machine first meets it, and that takes a part of a second.
    max_sequences, max_context: sequences of a step, tokens of one. q, k_cache, window: as for
    ``run``.
    """
    _, kv_heads, _, dim = k_cache.shape
    keys = max_context if window is None else min(max_context, window)
    if k_cache.dtype == torch.int8:
        return paged_decode8.specializations(kv_heads, max_sequences, keys, q.get_device())
    if k_cache.dtype in TYPES and dim in paged_decode16.SPLIT_CONFIGS:
        return paged_decode16.specializations(
            (q.shape[1], kv_heads), dim, max_sequences, keys, launch.sm_count(q.get_device())
        )
    return []


def run(
    inputs: PagedAttentionInputs, fallback: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """As the reference; ``fallback`` computes the parts that these kernels do not serve.

    It is a run function that also takes ``out`` and ``include_decode``.

    Rows of padding sequences (context_len 0) are zero; rows of no sequence are undefined.
    """
    q, k_cache, v_cache, block_tables, query_start, context_lens = inputs[:6]
    max_query, max_context, scale, window, k_scale, v_scale = inputs[6:]
    indices, sizes = (
        (block_tables, query_start, context_lens),
        (max_query, max_context, scale, window),
    )
    caches = (k_cache, v_cache, k_scale, v_scale)
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    if k_scale is not None or not _supports_prefill(q, k_cache, v_cache, indices, max_query):
        if max_query > 1:
            prompts = (
                fallback
                or importlib.import_module("modelmill.ops.triton.attention.paged_attention").run
            )
            prompts(inputs, out=out, include_decode=False)
        return _decode(q, caches, indices, sizes, out)
    served = _supports_decode(q, caches, indices)
    mixed = block_tables.shape[0] > 1 and (served or fallback is not None)
    _prefill(q, (k_cache, v_cache), indices, sizes, out, mixed=mixed)
    if mixed and served:
        _decode(q, caches, indices, sizes, out)
    elif mixed and fallback is not None:
        fallback(inputs._replace(max_query=1), out=out)
    return out


def _supports_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_query: int,
) -> bool:
    """Whether paged_attention.cu serves the prompts of a step.

    indices: page tables, starts, lengths.
    """
    page_size, dim = k_cache.shape[2:]
    if (
        max_query <= PREFILL_MIN_QUERIES
        or q.shape[0] <= PREFILL_MIN_TOKENS
        or q.dtype not in TYPES
        or not q.is_cuda
    ):
        return False
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype or dim not in (64, 128):
        return False
    page = 8 <= page_size <= KEYS and page_size & (page_size - 1) == 0
    few = indices[0].shape[0] <= MAX_SEQUENCES
    return (
        supports_indices(indices)
        and page
        and few
        and _is_tma_loadable(q)
        and _supports_pages(k_cache)
        and _supports_pages(v_cache)
    )


def _prefill(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, float, int | None],
    out: torch.Tensor,
    *,
    mixed: bool,
) -> None:
    """Fill the rows of prompts, and where not ``mixed`` those of single queries.

    sizes: most queries of a sequence, most keys, the scores' scale, the window.
    """
    k_cache, v_cache = caches
    tokens, heads, dim = q.shape
    pages, kv_heads, page_size, _ = k_cache.shape
    batch, columns = indices[0].shape
    _, max_context, scale, window = sizes
    with torch.cuda.device(q.device):
        # Of each sequence's tiles at most one is not full. More of them than blocks are handed out
        # by a counter.
        tiles = (tokens // QUERIES + batch) * heads
        blocks = min(launch.sm_count(q.get_device()), tiles)
        tile_counter = _tile_counters(q.get_device()) if tiles > blocks else None
        pointers = launch.data_pointers(*indices, out, tile_counter)
        at_once = (
            _heads_per_pass(kv_heads, max_context * dim * q.element_size() * 2) * heads // kv_heads
        )
        counts = (
            batch,
            columns,
            indices[0].stride(0),
            heads,
            heads // kv_heads,
            pages,
            window or 0,
            mixed,
            at_once,
        )
        work = struct.pack("=5Q9if", *pointers, *counts, scale * LOG2E)
        kernel = _prefill_kernel(q.dtype, dim, page_size, q.get_device())
        kernel.launch(
            blocks,
            _query_tensor_map(q),
            _page_tensor_map(k_cache),
            _page_tensor_map(v_cache),
            work,
            pdl=True,
        )


def _tile_counters(device: int) -> torch.Tensor:
    """Two zeros that every launch resets to zeros, one pair per stream.

    In a graph they are the graph's own, which may be replayed on any stream.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    return _stream_counters(device, torch._C._cuda_getCurrentRawStream(device))


@functools.cache
def _stream_counters(device: int, stream: int) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int32, device=device)


def _supports_decode(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> bool:
    """Whether single queries are served here; caches: keys, values and their scales."""
    k_cache, v_cache, k_scale, v_scale = caches
    if k_scale is None:
        return paged_decode16.supports_decode(q, k_cache, v_cache, indices)
    return paged_decode8.supports_decode(q, k_cache, v_cache, indices, k_scale, v_scale)


def _decode(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, float, int | None],
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill the rows of single queries. sizes: as for ``_prefill``."""
    k_cache, v_cache, k_scale, v_scale = caches
    if k_scale is None or v_scale is None:
        return paged_decode16.run(q, (k_cache, v_cache), indices, *sizes[1:], out)
    return paged_decode8.run(q, (k_cache, v_cache, k_scale, v_scale), indices, *sizes[1:], out)


def _prefill_kernel(dtype: torch.dtype, dim: int, page_size: int, device: int) -> launch.CudaKernel:
    tile = 2 * dim * STAGES * (QUERIES + 2 * KEYS)
    macros = _prefill_macros(dtype, dim, page_size)
    return launch.load_kernel(
        "paged_attention", "prefill_attention", macros, THREADS, tile + PLAN_BYTES, device
    )


def _prefill_macros(dtype: torch.dtype, dim: int, page_size: int) -> tuple[str, ...]:
    return (f"DIM={dim}", f"PAGE={page_size}", *TYPES[dtype])


def _heads_per_pass(kv_heads: int, bytes_per_head: int) -> int:
    """The largest divisor of ``kv_heads`` whose keys and values fit in L2 together."""
    most = max(1, min(kv_heads, L2_RESIDENT_BYTES // max(bytes_per_head, 1)))
    return next(n for n in range(most, 0, -1) if kv_heads % n == 0)


def _is_tma_loadable(x: torch.Tensor) -> bool:
    """Whether TMA can read x: 16-byte steps, the last dimension packed."""
    step = 16 // x.element_size()
    return (
        x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % step == 0 for s in x.stride()[:-1])
    )


def _supports_pages(cache: torch.Tensor) -> bool:
    return cache.is_contiguous() and cache.data_ptr() % 16 == 0


def _query_tensor_map(q: torch.Tensor) -> bytes:
    """Tensor map of q [T, heads, D]; box: 64 channels of one head, all rows of a tile."""
    tokens, heads, dim = q.shape
    size = q.element_size()
    strides = (q.stride(1) * size, q.stride(0) * size)
    return launch.tensor_map(q.data_ptr(), q.dtype, (dim, heads, tokens), strides, (64, 1, QUERIES))


def _page_tensor_map(cache: torch.Tensor) -> bytes:
    """Tensor map of a cache [rows / 8, D / 64, 8, 64]; box: one page."""
    pages, kv_heads, page_size, dim = cache.shape
    row = dim * cache.element_size()
    sizes = (64, 8, dim // 64, pages * kv_heads * page_size // 8)
    return launch.tensor_map(
        cache.data_ptr(),
        cache.dtype,
        sizes,
        (row, 128, 8 * row),
        (64, 8, dim // 64, page_size // 8),
    )
