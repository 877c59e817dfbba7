"""Norm of q and k, RoPE, logn and the KV-cache write, a token at a time in C++ (rope_cache.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.rope_cache import RopeCacheInputs, rope_cache

available = build.available
_DTYPES = build.DTYPES


def run(qkv: torch.Tensor, inputs: RopeCacheInputs) -> torch.Tensor:
    """As the reference, which also serves strided caches, other dtypes and a single norm."""
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, k_norm, eps = inputs[:10]
    dtype = qkv.dtype
    if (
        dtype not in _DTYPES
        or k_cache.dtype not in _DTYPES
        or not (k_cache.is_contiguous() and v_cache.is_contiguous())
        or v_cache.dtype is not k_cache.dtype
        or slots.dtype is not torch.int64
        or not _plain(cos, torch.float32)
        or not _plain(sin, torch.float32)
        or not _plain(q_scale, torch.float32)
        or not _plain(q_norm, dtype)
        or not _plain(k_norm, dtype)
        or (cos is None) is not (sin is None)
        or (q_norm is None) is not (k_norm is None)
    ):
        return rope_cache(qkv, inputs)
    _, kv_heads, page_size, dim = k_cache.shape
    qkv, slots = qkv.contiguous(), slots.contiguous()
    tokens = qkv.shape[0]
    out = torch.empty(tokens, heads, dim, dtype=dtype)
    _kernel()(
        out.data_ptr(),
        qkv.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        None if q_scale is None else q_scale.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        tokens,
        heads,
        kv_heads,
        dim,
        page_size,
        eps,
        _DTYPES[dtype],
        _DTYPES[k_cache.dtype],
    )
    return out


def _plain(tensor: torch.Tensor | None, dtype: torch.dtype) -> bool:
    return tensor is None or (tensor.dtype is dtype and tensor.is_contiguous())


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("rope_cache", "p" * 10 + "q" * 5 + "dii")
