"""Attention over the paged cache in C++ (paged_attention.cpp).

Prompts are taken in blocks of queries that share tiles of keys; a single query's context is split
into parts of fixed length over the threads, so that a sequence gives the same bits alone and in a
batch.
"""

from __future__ import annotations

import torch

from modelmill.ops.attention_support import AttentionSupportRange
from modelmill.ops.cpu.common import build
from modelmill.ops.paged_attention import PagedAttentionInputs
from modelmill.ops.score_mods import NO_SCORE_MODS

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_loader_by_gil_mode("paged_attention", "p" * 11 + "q" * 8 + "ddii")
_DTYPE_CODES = build.DTYPE_CODES
SUPPORTED_PROBLEMS = tuple(
    AttentionSupportRange(
        dtypes=tuple(_DTYPE_CODES),
        page_dtypes=(torch.int8,) if scaled else tuple(_DTYPE_CODES),
        scaled=scaled,
        serves_score_mods=True,
        latent=latent,
    )
    for scaled in (False, True)
    for latent in (False, True)
)


def supports(inputs: PagedAttentionInputs) -> bool:
    """Whether pages and indices are packed, indices int32, scales, slopes and sinks float32."""
    k_cache, v_cache, *indices = inputs[1:6]
    _, slopes, sinks = inputs.score_mods or NO_SCORE_MODS
    floats = (inputs.k_scale, inputs.v_scale, slopes, sinks)
    return (
        k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and all(map(_is_contiguous_int32, indices))
        and all(
            each is None or (each.dtype is torch.float32 and each.is_contiguous())
            for each in floats
        )
    )


def run(inputs: PagedAttentionInputs) -> torch.Tensor:
    """As the reference."""
    q, k_cache, v_cache, block_tables, query_start, context_lens = inputs[:6]
    max_query, _, scale, window, k_scale, v_scale, mods, value_dim = inputs[6:]
    if value_dim is not None:
        v_cache, v_scale = k_cache, k_scale
    softcap, slopes, sinks = mods or NO_SCORE_MODS
    dtype = q.dtype
    _, kv_heads, page_size, dim = k_cache.shape
    q = q.contiguous()
    tokens, heads, _ = q.shape
    sequences, pages = block_tables.shape
    out = torch.empty(tokens, heads * inputs.output_dim, dtype=dtype)
    _kernel(max_query > 1)(
        out.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_tables.data_ptr(),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        *(None if each is None else each.data_ptr() for each in (k_scale, v_scale, slopes, sinks)),
        sequences,
        heads,
        kv_heads,
        page_size,
        dim,
        inputs.output_dim,
        pages,
        window or 0,
        scale,
        softcap or 0.0,
        _DTYPE_CODES[dtype],
        _DTYPE_CODES.get(k_cache.dtype, 0),
    )
    return out


def _is_contiguous_int32(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.int32 and tensor.is_contiguous()
