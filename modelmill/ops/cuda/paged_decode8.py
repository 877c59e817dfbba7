"""Decoding over pages of int8 in whole numbers (paged_decode8.cu): heads with keys and values of their own."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda import build, launch

LOG2E = 1.4426950408889634
TYPES = {torch.bfloat16: (), torch.float16: ("HALF",)}
# Sizes of paged_decode8.cu; blocks whose registers fit a multiprocessor together.
KEYS, WARPS, BLOCKS, MOST_SPLITS = 32, 4, 4, 8


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles the commonest form, once a machine."""
    return build.serves(kind, "paged_decode8", _macros(torch.bfloat16, 128, 16, 1))


def serves(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> bool:
    """q in 16 bits, heads of 64 or 128, one KV head each, packed int8 caches with pages of 8 to 128 tokens.

    indices: page tables, starts, lengths.
    """
    if k_scale is None or v_scale is None or q.dtype not in TYPES or not q.is_cuda:
        return False
    _, kv_heads, page, dim = k_cache.shape
    if k_cache.dtype != torch.int8 or v_cache.dtype != torch.int8 or q.shape[1] != kv_heads or dim not in (64, 128):
        return False
    caches = (k_cache, v_cache, k_scale, v_scale)
    packed = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in caches) and q.stride(2) == 1
    known = all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in indices)
    return packed and known and 8 <= page <= 128 and page & (page - 1) == 0 and indices[0].shape[1] > 0


def splits_of(pairs: int, keys: int, multiprocessors: int) -> int:
    """Blocks that share one context: as many as there is room for, each with keys for all its warps; a power of two."""
    wanted = min(BLOCKS * multiprocessors // pairs, -(-keys // (KEYS * WARPS)), MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def run(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    indices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_context: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill the rows of single queries of ``out`` [T, heads · D], and leave the others alone.

    caches: keys, values and their scales; indices: page tables, starts, lengths.
    """
    tables = indices[0]
    _, heads, page, dim = caches[0].shape
    batch, device = tables.shape[0], q.get_device()
    keys = max_context if window is None else min(max_context, window)
    splits = splits_of(batch * heads, keys, launch.multiprocessors(device))
    pointers = launch.addresses(q, *caches, *indices, out)
    counts = (heads, tables.shape[1], tables.stride(0), q.stride(0), q.stride(1), window or 0)
    work = struct.pack("=9Q6if4x", *pointers, *counts, scale * LOG2E)
    with torch.cuda.device(q.device):
        macros = _macros(q.dtype, dim, page, splits)
        kernel = launch.kernel("paged_decode8", "paged_decode8", macros, 32 * WARPS, 0, device)
        kernel.launch(batch * heads * splits, work, early=True)
    return out


def _macros(dtype: torch.dtype, dim: int, page: int, splits: int) -> tuple[str, ...]:
    return (f"DIM={dim}", f"PAGE={page}", f"SPLITS={splits}", f"WARPS={WARPS}", f"BLOCKS={BLOCKS}", *TYPES[dtype])
