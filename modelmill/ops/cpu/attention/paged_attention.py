"""Attention over the paged cache in C++ (paged_attention.cpp).

Prompts are taken in blocks of queries that share tiles of keys; a single query's context is split
into parts of fixed length over the threads, so that a sequence gives the same bits alone and in a
batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.paged_attention import PagedAttentionInputs, paged_attention

available = build.available
_DTYPES = build.DTYPES


def run(inputs: PagedAttentionInputs) -> torch.Tensor:
    """As the reference, which also serves fp8 pages, strided caches and other index dtypes."""
    q, k_cache, v_cache, block_tables, query_start, context_lens = inputs[:6]
    max_query, _, scale, window, k_scale, v_scale = inputs[6:]
    dtype = q.dtype
    if (
        dtype not in _DTYPES
        or not _supports_pages(k_cache.dtype, k_scale, v_scale)
        or v_cache.dtype is not k_cache.dtype
        or not (k_cache.is_contiguous() and v_cache.is_contiguous())
        or not (_packed(block_tables) and _packed(query_start) and _packed(context_lens))
    ):
        return paged_attention(inputs)
    _, kv_heads, page_size, dim = k_cache.shape
    q = q.contiguous()
    tokens, heads, _ = q.shape
    sequences, pages = block_tables.shape
    out = torch.empty(tokens, heads * dim, dtype=dtype)
    (_kernel_without_gil() if max_query > 1 else _kernel())(
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        None if k_scale is None else k_scale.data_ptr(),
        None if v_scale is None else v_scale.data_ptr(),
        sequences,
        heads,
        kv_heads,
        page_size,
        dim,
        pages,
        window or 0,
        scale,
        _DTYPES[dtype],
        _DTYPES.get(k_cache.dtype, 0),
    )
    return out


def _supports_pages(dtype: torch.dtype, *scales: torch.Tensor | None) -> bool:
    """Whether the kernel reads pages of this dtype: 16 or 32 bits, or int8 with packed scales."""
    if all(scale is None for scale in scales):
        return dtype in _DTYPES
    return dtype is torch.int8 and all(
        scale is not None and scale.dtype is torch.float32 and scale.is_contiguous()
        for scale in scales
    )


def _packed(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.int32 and tensor.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("paged_attention", "p" * 9 + "q" * 7 + "dii")


@functools.cache
def _kernel_without_gil() -> Callable[..., Any]:
    return build.function("paged_attention", "p" * 9 + "q" * 7 + "dii", release_gil=True)
