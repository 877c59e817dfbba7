"""Norm of q and k, RoPE, logn and the KV-cache write, a token at a time in C++ (rope_cache.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.ops.rope_cache_support import RopeCacheSupportRange

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("rope_cache", "p" * 10 + "q" * 5 + "dii")
_DTYPE_CODES = build.DTYPE_CODES
SUPPORTED_PROBLEMS = (
    RopeCacheSupportRange(
        dtypes=tuple(_DTYPE_CODES),
        page_dtypes=tuple(_DTYPE_CODES),
        same_page_dtypes=True,
        plain_operands=True,
    ),
)


def supports(qkv: torch.Tensor, inputs: RopeCacheInputs) -> bool:  # noqa: ARG001
    """Whether pages, angles and norms are contiguous."""
    k_cache, v_cache, *_ = inputs
    return (
        k_cache.is_contiguous()
        and v_cache.is_contiguous()
        and all(each is None or each.is_contiguous() for each in inputs[4:9])
    )


def run(qkv: torch.Tensor, inputs: RopeCacheInputs) -> torch.Tensor:
    """As the reference."""
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, k_norm, eps = inputs[:10]
    dtype = qkv.dtype
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
        _DTYPE_CODES[dtype],
        _DTYPE_CODES[k_cache.dtype],
    )
    return out
