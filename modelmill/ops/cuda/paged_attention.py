"""Prefill attention over a paged KV cache with Hopper's own instructions (paged_attention.cu).

Of decoding only pages of int8 are served (paged_decode8). A step that mixes prompts and single queries is shared: the
kernel takes whole tiles of 128 queries, of which a single query would fill one row, so those are left to the variant
behind this one, where there is one. With pages of int8 it is the other way round: that one has the prompts.
"""

from __future__ import annotations

import importlib
import importlib.util
import struct
from collections.abc import Callable

import torch

from modelmill.ops.cuda import build, launch, paged_decode8

LOG2E = 1.4426950408889634
SHARES = True
FEW_QUERIES = 64  # up to here half of a tile of 128 would be empty, or more
FEW_TOKENS = 128  # up to here starting the copies takes longer than all else
_TRITON = importlib.util.find_spec("triton") is not None
TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
# Sizes of paged_attention.cu.
QUERIES, KEYS, STAGES, THREADS = 128, 128, 2, 384
MOST_SEQUENCES, PLAN_BYTES = 1024, 13 * 1024
# Keys and values of the heads that are served at the same time: what stays in an L2 cache of 50 MB beside all else.
CACHED_BYTES = 32 << 20


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    common = _macros(torch.bfloat16, 128, 16)
    return build.serves(kind, "paged_attention", common) or paged_decode8.available(kind)


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
    """Prompts in 16 bits, heads of 64 or 128, packed caches with pages of 8 to 128 tokens, up to 1,024 sequences.

    Over pages of int8 the single queries of a step, alone or among prompts.
    """
    if k_scale is not None:
        around = (block_tables, query_start, context_lens)
        several = max_query == 1 or (block_tables.shape[0] > 1 and _TRITON)
        return several and paged_decode8.serves(q, k_cache, v_cache, around, k_scale, v_scale)
    page_size, dim = k_cache.shape[2:]
    if max_query <= FEW_QUERIES or q.shape[0] <= FEW_TOKENS or q.dtype not in TYPES or not q.is_cuda:
        return False
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype or dim not in (64, 128):
        return False
    indices = (block_tables, query_start, context_lens)
    packed = all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in indices)
    page = 8 <= page_size <= KEYS and page_size & (page_size - 1) == 0
    return (
        packed
        and page
        and block_tables.shape[0] <= MOST_SEQUENCES
        and _copyable(q)
        and _paged(k_cache)
        and _paged(v_cache)
    )


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
    rest: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """As the reference; ``rest``, a run that also takes max_query = 1 and ``out``, fills in the single queries.

    Over pages of int8 it fills in the others, told so by ``singles``. Rows of padding sequences (context_len 0) are
    zero; rows of no sequence are undefined.
    """
    if k_scale is not None and v_scale is not None:
        caches, indices = (k_cache, v_cache, k_scale, v_scale), (block_tables, query_start, context_lens)
        sizes = (max_query, max_context, scale, window)
        return _over_int8(q, caches, indices, sizes, rest)
    tokens, heads, dim = q.shape
    pages, kv_heads, page_size, _ = k_cache.shape
    batch, columns = block_tables.shape
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    mixed = rest is not None and batch > 1
    with torch.cuda.device(q.device):
        # Of each sequence's tiles at most one is not full. More of them than blocks are handed out by a counter.
        tiles = (tokens // QUERIES + batch) * heads
        blocks = min(launch.multiprocessors(q.get_device()), tiles)
        taken = torch.zeros(1, dtype=torch.int32, device=q.device) if tiles > blocks else None
        pointers = [t.data_ptr() for t in (block_tables, query_start, context_lens, out)]
        pointers.append(0 if taken is None else taken.data_ptr())
        at_once = _heads_at_once(kv_heads, max_context * dim * q.element_size() * 2) * heads // kv_heads
        counts = (batch, columns, block_tables.stride(0), heads, heads // kv_heads, pages, window or 0, mixed, at_once)
        work = struct.pack("=5Q9if", *pointers, *counts, scale * LOG2E)
        kernel = _kernel(q.dtype, dim, page_size, q.get_device())
        kernel.launch(blocks, _queries(q), _pages(k_cache), _pages(v_cache), work)
    if mixed and rest is not None:
        around = (block_tables, query_start, context_lens, 1, max_context, scale, window)
        rest(q, k_cache, v_cache, *around, out=out)
    return out


def _over_int8(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, float, int | None],
    rest: Callable[..., torch.Tensor] | None,
) -> torch.Tensor:
    """sizes: most queries of a sequence, most keys, the scores' scale, the window."""
    max_query, max_context, scale, window = sizes
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    if max_query > 1:
        prompts = rest or importlib.import_module("modelmill.ops.triton.paged_attention").run
        prompts(q, *caches[:2], *indices, *sizes, *caches[2:], out=out, singles=False)
    return paged_decode8.run(q, caches, indices, max_context, scale, window, out)


def _kernel(dtype: torch.dtype, dim: int, page_size: int, device: int) -> launch.Kernel:
    tile = 2 * dim * STAGES * (QUERIES + 2 * KEYS)
    macros = _macros(dtype, dim, page_size)
    return launch.kernel("paged_attention", "prefill_attention", macros, THREADS, tile + PLAN_BYTES, device)


def _macros(dtype: torch.dtype, dim: int, page_size: int) -> tuple[str, ...]:
    return (f"DIM={dim}", f"PAGE={page_size}", *TYPES[dtype])


def _heads_at_once(kv_heads: int, each: int) -> int:
    """The largest divisor of ``kv_heads`` whose keys and values, ``each`` bytes a head, stay in the cache together."""
    most = max(1, min(kv_heads, CACHED_BYTES // max(each, 1)))
    return next(n for n in range(most, 0, -1) if kv_heads % n == 0)


def _copyable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read x: 16-byte steps, the last dimension packed."""
    step = 16 // x.element_size()
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % step == 0 for s in x.stride()[:-1])


def _paged(cache: torch.Tensor) -> bool:
    return cache.is_contiguous() and cache.data_ptr() % 16 == 0


def _queries(q: torch.Tensor) -> bytes:
    """q [T, heads, D] as the copy engine sees it; it takes 64 values of one head in all rows of a tile at a time."""
    tokens, heads, dim = q.shape
    size = q.element_size()
    strides = (q.stride(1) * size, q.stride(0) * size)
    return launch.tensor_map(q.data_ptr(), q.dtype, (dim, heads, tokens), strides, (64, 1, QUERIES))


def _pages(cache: torch.Tensor) -> bytes:
    """A cache as the copy engine sees it: [eights of rows, halves of a row, 8 rows, 64]; it takes a page at a time."""
    pages, kv_heads, page_size, dim = cache.shape
    row = dim * cache.element_size()
    sizes = (64, 8, dim // 64, pages * kv_heads * page_size // 8)
    return launch.tensor_map(
        cache.data_ptr(), cache.dtype, sizes, (row, 128, 8 * row), (64, 8, dim // 64, page_size // 8)
    )
