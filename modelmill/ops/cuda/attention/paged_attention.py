"""Attention over a paged KV cache on Hopper: prefill (paged_attention.cu) and decode.

A step that mixes prompts and single queries is shared: its prompts and its single queries each go
to the first kernel that serves them (``attention_support``), here or in the backends behind. The
prefill kernel takes whole tiles of 128 queries; prompts that are too short for the tiles, or have
pages of int8, are left to others. Single queries are decoded by paged_decode16 and paged_decode8.
"""

from __future__ import annotations

import functools
import struct

import torch

from modelmill.ops.attention_support import AttentionPhase, AttentionSupportRange
from modelmill.ops.bound_op import make_kernel_dispatcher
from modelmill.ops.cuda.attention import paged_decode, paged_decode8, paged_decode16
from modelmill.ops.cuda.attention.paged_decode import DTYPE_DEFINES, LOG2E, supports_indices
from modelmill.ops.cuda.common import build, launch
from modelmill.ops.kernel_support import UNBOUNDED, Kernel
from modelmill.ops.paged_attention import DECLARATION, PagedAttentionInputs

MAX_NON_PREFILL_QUERIES = 64  # up to here half of a tile of 128 would be empty, or more
MAX_NON_PREFILL_TOKENS = 128  # up to here starting the copies takes longer than all else
# Sizes of paged_attention.cu.
QUERY_TILE = 128
KEY_TILE = 128
STAGES = 2
THREADS = 384
MAX_SEQUENCES, PLAN_BYTES = 1024, 13 * 1024
# Keys and values of the heads that are served at the same time: what stays in an L2 cache of 50 MB
# beside all else.
L2_RESIDENT_BYTES = 32 << 20


def unavailable_reason(device_type: str) -> str | None:
    """None if the kernel supports this device type; else the reason.

    Compiles the most common config (cached on disk).
    """
    common = _prefill_macros(torch.bfloat16, 128, 16)
    reason = build.kernel_compile_failure_reason(device_type, "paged_attention", common)
    return (
        reason
        or paged_decode8.unavailable_reason(device_type)
        or paged_decode16.unavailable_reason(device_type)
    )


def warmup_sizes(
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
        return paged_decode8.warmup_sizes(kv_heads, max_sequences, keys, q.get_device())
    if k_cache.dtype in DTYPE_DEFINES and dim in paged_decode16.SPLIT_CONFIGS:
        return paged_decode16.warmup_sizes(
            (q.shape[1], kv_heads), dim, max_sequences, keys, launch.sm_count(q.get_device())
        )
    return []


def prefill(
    inputs: PagedAttentionInputs, out: torch.Tensor | None = None, *, mixed: bool = False
) -> torch.Tensor:
    """Fill the rows of prompts and, where not ``mixed``, those of single queries.

    Rows of padding sequences (context_len 0) are zero; rows of no sequence are undefined.
    """
    q, k_cache, v_cache, tables, starts, lengths = inputs[:6]
    out = paged_decode.allocate_output(q) if out is None else out
    _prefill(q, (k_cache, v_cache), (tables, starts, lengths), inputs[6:10], out, mixed=mixed)
    return out


def supports_prefill(inputs: PagedAttentionInputs) -> bool:
    """Whether TMA can read the queries, pages are packed and indices int32."""
    q, k_cache, v_cache, *indices = inputs[:6]
    return (
        supports_indices(tuple(indices))
        and _is_tma_loadable(q)
        and _is_contiguous_and_aligned(k_cache)
        and _is_contiguous_and_aligned(v_cache)
    )


PREFILL = Kernel(
    AttentionSupportRange(
        # Of a mixed step with single queries that no kernel decodes, all rows.
        phases=(AttentionPhase.PREFILL, AttentionPhase.PROMPTS, AttentionPhase.MIXED),
        m=(MAX_NON_PREFILL_TOKENS + 1, UNBOUNDED),
        queries=(MAX_NON_PREFILL_QUERIES + 1, UNBOUNDED),
        sequences=(1, MAX_SEQUENCES),
        dims=(64, 128),
        page_sizes=(8, KEY_TILE),
        dtypes=tuple(DTYPE_DEFINES),
        on_gpu=True,
    ),
    prefill,
    supports_prefill,
)
KERNELS = (PREFILL, *paged_decode16.KERNELS, *paged_decode8.KERNELS)
SUPPORTED_PROBLEMS = tuple(kernel.range for kernel in KERNELS)
run = make_kernel_dispatcher(KERNELS, DECLARATION)


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
        tiles = (tokens // QUERY_TILE + batch) * heads
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


def _prefill_kernel(dtype: torch.dtype, dim: int, page_size: int, device: int) -> launch.CudaKernel:
    tile = 2 * dim * STAGES * (QUERY_TILE + 2 * KEY_TILE)
    macros = _prefill_macros(dtype, dim, page_size)
    return launch.compile_and_load_kernel(
        "paged_attention", "prefill_attention", macros, THREADS, tile + PLAN_BYTES, device
    )


def _prefill_macros(dtype: torch.dtype, dim: int, page_size: int) -> tuple[str, ...]:
    return (f"DIM={dim}", f"PAGE={page_size}", *DTYPE_DEFINES[dtype])


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


def _is_contiguous_and_aligned(cache: torch.Tensor) -> bool:
    return cache.is_contiguous() and cache.data_ptr() % 16 == 0


def _query_tensor_map(q: torch.Tensor) -> bytes:
    """Tensor map of q [T, heads, D]; box: 64 channels of one head, all rows of a tile."""
    tokens, heads, dim = q.shape
    size = q.element_size()
    strides = (q.stride(1) * size, q.stride(0) * size)
    return launch.tensor_map(
        q.data_ptr(), q.dtype, (dim, heads, tokens), strides, (64, 1, QUERY_TILE)
    )


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
