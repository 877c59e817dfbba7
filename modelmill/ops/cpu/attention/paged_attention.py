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

from modelmill.ops.attention_range import AttentionRange
from modelmill.ops.cpu.common import build
from modelmill.ops.paged_attention import PagedAttentionInputs

available = build.available
_DTYPES = build.DTYPES
SUPPORTED_PROBLEMS = (
    AttentionRange(dtypes=tuple(_DTYPES), page_dtypes=tuple(_DTYPES)),
    AttentionRange(dtypes=tuple(_DTYPES), page_dtypes=(torch.int8,), scaled=True),
)


def supports(inputs: PagedAttentionInputs) -> bool:
    """Whether pages and indices are packed, indices int32 and scales float32."""
    k_cache, v_cache, *indices = inputs[1:6]
    scales = (inputs.k_scale, inputs.v_scale)
    return (
        k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and all(map(_packed, indices))
        and all(
            each is None or (each.dtype is torch.float32 and each.is_contiguous())
            for each in scales
        )
    )


def run(inputs: PagedAttentionInputs) -> torch.Tensor:
    """As the reference."""
    q, k_cache, v_cache, block_tables, query_start, context_lens = inputs[:6]
    max_query, _, scale, window, k_scale, v_scale = inputs[6:]
    dtype = q.dtype
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


def _packed(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.int32 and tensor.is_contiguous()


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("paged_attention", "p" * 9 + "q" * 7 + "dii")


@functools.cache
def _kernel_without_gil() -> Callable[..., Any]:
    return build.function("paged_attention", "p" * 9 + "q" * 7 + "dii", release_gil=True)
