"""Per-head norm, RoPE, logn and KV-cache write: qkv is read once, q, k and v are written once.

Computes: q[T, heads, D], and k, v to their slots, from qkv[T, (heads + 2 · kv_heads) · D]: q/k
    norm, RoPE, logn
Dtypes: qkv and q bfloat16, float16 or float32; pages of that dtype, int8 or e4m3 with float32
    scales per token and head
Layout: qkv row-major; pages [pages, kv_heads, page_size, D], contiguous channels
Range: any M; D even, up to 256
Technique: one read and one write per value, cached launcher, PDL
Ops: rope_cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.carveout import DECODE_CARVEOUT_PERCENT
from modelmill.ops.rope_cache import RopeCacheInputs
from modelmill.ops.rope_cache_support import RopeCacheSupportRange
from modelmill.ops.triton.common.device import as_rows, next_power_of_two, supports_fp8
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.dtype_convert import amax_to_scale, round_to_dtype
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

QUANT_MAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


MAX_DIM = 256
SUPPORTED_PROBLEMS = (
    RopeCacheSupportRange(scaled=False, max_dim=MAX_DIM),
    RopeCacheSupportRange(
        scaled=True,
        page_dtypes=tuple(QUANT_MAX),
        max_dim=MAX_DIM,
        fits=lambda rows: rows.page_dtypes[0] is torch.int8 or supports_fp8(rows.device),
    ),
)


def supports(qkv: torch.Tensor, inputs: RopeCacheInputs) -> bool:
    """Whether keys and values have one layout with contiguous channels; scales are contiguous."""
    k_cache, v_cache, k_scale, v_scale = *inputs[:2], *inputs[10:]
    packed = (
        k_scale is None or v_scale is None or (k_scale.is_contiguous() and v_scale.is_contiguous())
    )
    return packed and k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1


def run(qkv: torch.Tensor, inputs: RopeCacheInputs) -> torch.Tensor:
    """Run the op; negative slots are skipped on every device."""
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, k_norm, eps = inputs[:10]
    k_scale, v_scale = inputs[10:]
    _, kv_heads, page_size, dim = k_cache.shape
    flat = as_rows(qkv)
    tokens, total = flat.shape[0], heads + 2 * kv_heads
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    rotate, norm = cos is not None and sin is not None, q_norm is not None and k_norm is not None
    half = next_power_of_two(dim // 2)
    # Two or four values per thread, so that even one token uses many SMs.
    heads_per_program = max(1, min(512 // half, next_power_of_two(total)))
    pdl, strides = pdl_launch_options(qkv.device, tokens), (flat.stride(0), *k_cache.stride()[:3])
    _launcher(
        (tokens, -(-total // heads_per_program), 1),
        (
            flat, q, k_cache, v_cache,
            flat if k_scale is None else k_scale, flat if v_scale is None else v_scale, slots,
            cos.contiguous() if cos is not None and rotate else flat,
            sin.contiguous() if sin is not None and rotate else flat,
            flat if q_scale is None else q_scale,
            flat if q_norm is None or not norm else q_norm,
            flat if k_norm is None or not norm else k_norm,
        ),
        (*strides, eps),
        strides,
        (
            heads, kv_heads, page_size, dim, heads_per_program, half, rotate, norm,
            q_scale is not None,
            0.0 if k_scale is None else QUANT_MAX[k_cache.dtype], pdl["PDL"],
        ),
        {
            "num_warps": max(1, min(4, heads_per_program * half // 128)),
            "launch_pdl": pdl["launch_pdl"],
        },
        # the carveout of the decode kernel that follows; the grouped-head kernel needs more shared
        # memory and sets none
        DECODE_CARVEOUT_PERCENT if heads == kv_heads else None,
    )  # fmt: skip
    return q


@triton.jit
def _kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, cos_ptr, sin_ptr, scale_ptr,
    q_norm_ptr, k_norm_ptr, stride, page_stride, head_stride, token_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    SHARE: tl.constexpr,
    HALF: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * SHARE + tl.arange(0, SHARE))[:, None]
    d = tl.arange(0, HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (d < DIM // 2)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = head >= HEADS + KV_HEADS
    slot = tl.load(slots_ptr + token).to(tl.int64)
    pdl_wait_and_trigger(PDL)
    source = qkv_ptr + token * stride + head * DIM + d
    a = tl.load(source, mask=inside, other=0.0)
    b = tl.load(source + DIM // 2, mask=inside, other=0.0)
    dtype = a.dtype
    if NORM:
        a, b = _head_norm(a, b, q_norm_ptr, k_norm_ptr, is_q, is_v, d, eps, DIM)
    first, second = a.to(tl.float32), b.to(tl.float32)
    if ROTATE:
        cos = tl.load(cos_ptr + token * (DIM // 2) + d, mask=d < DIM // 2, other=1.0)
        sin = tl.load(sin_ptr + token * (DIM // 2) + d, mask=d < DIM // 2, other=0.0)
        cos = tl.where(is_v, 1.0, cos)
        sin = tl.where(is_v, 0.0, sin)
        rotated_first = (first * cos - second * sin).to(dtype).to(tl.float32)
        second = (second * cos + first * sin).to(dtype).to(tl.float32)
        first = rotated_first
    if SCALE:
        factor = tl.where(is_q, tl.load(scale_ptr + token), 1.0)
        first, second = first * factor, second * factor
    target = q_ptr + (token * HEADS + head) * DIM + d
    tl.store(target, first.to(dtype), mask=inside & is_q)
    tl.store(target + DIM // 2, second.to(dtype), mask=inside & is_q)
    # a block, because Triton 3.9's interpreter does not accept a scalar comparison in a mask
    slot_valid = slot + tl.zeros([1, 1], tl.int64) >= 0
    store_valid = inside & slot_valid
    cache_offset = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride + d
    k_at = k_ptr + cache_offset + (head - HEADS) * head_stride
    v_at = v_ptr + cache_offset + (head - HEADS - KV_HEADS) * head_stride
    cache_dtype: tl.constexpr = k_ptr.dtype.element_ty
    if LARGEST > 0.0:
        # The reference rounds the values in the activations' dtype; so does this kernel.
        magnitude = tl.where(inside, tl.maximum(tl.abs(first), tl.abs(second)), 0.0)
        scale = amax_to_scale(tl.max(magnitude, axis=1, keep_dims=True), LARGEST)
        first = round_to_dtype(tl.div_rn(first, scale), cache_dtype, LARGEST)
        second = round_to_dtype(tl.div_rn(second, scale), cache_dtype, LARGEST)
        scale_offset = (slot // PAGE) * KV_HEADS * PAGE + slot % PAGE
        head_valid = (head < HEADS + 2 * KV_HEADS) & slot_valid
        tl.store(k_scale_ptr + scale_offset + (head - HEADS) * PAGE, scale, mask=head_valid & is_k)
        tl.store(
            v_scale_ptr + scale_offset + (head - HEADS - KV_HEADS) * PAGE,
            scale,
            mask=head_valid & is_v,
        )
    else:
        first, second = first.to(cache_dtype), second.to(cache_dtype)
    tl.store(k_at, first, mask=store_valid & is_k)
    tl.store(k_at + DIM // 2, second, mask=store_valid & is_k)
    tl.store(v_at, first, mask=store_valid & is_v)
    tl.store(v_at + DIM // 2, second, mask=store_valid & is_v)


@triton.jit
def _head_norm(a, b, q_norm_ptr, k_norm_ptr, is_q, is_v, d, eps, DIM: tl.constexpr):
    """RMSNorm of the heads of q and k; heads of v are unchanged. a and b: halves of the heads."""
    half = DIM // 2
    dtype = a.dtype
    first, second = a.to(tl.float32), b.to(tl.float32)
    square = tl.sum(first * first, axis=1, keep_dims=True) + tl.sum(
        second * second, axis=1, keep_dims=True
    )
    scale = tl.rsqrt(square / DIM + eps)
    wq = tl.load(q_norm_ptr + d, mask=d < half, other=0.0).to(tl.float32)
    wk = tl.load(k_norm_ptr + d, mask=d < half, other=0.0).to(tl.float32)
    vq = tl.load(q_norm_ptr + half + d, mask=d < half, other=0.0).to(tl.float32)
    vk = tl.load(k_norm_ptr + half + d, mask=d < half, other=0.0).to(tl.float32)
    normal_a = ((first * scale).to(dtype).to(tl.float32) * tl.where(is_q, wq, wk)).to(dtype)
    normal_b = ((second * scale).to(dtype).to(tl.float32) * tl.where(is_q, vq, vk)).to(dtype)
    return tl.where(is_v, a, normal_a), tl.where(is_v, b, normal_b)


_launcher = CachedLauncher(_kernel)
