"""MLA's norm, RoPE and KV-cache write: latent vector and key of a token, and its queries' ends.

Computes: rmsnorm(latent[T, rank]) · weight and the rotated key to their slots; the last channels of
    q[T, heads, query_dim] rotated in place
Dtypes: q and latent bfloat16, float16 or float32; pages of that dtype, int8 or e4m3 with a float32
    scale per token
Layout: rows with contiguous channels; pages [pages, 1, page_size, rank + rope_dim]
Range: any M; rank up to 2,048, rope_dim even, up to 256
Technique: one launch; a program for the row of a token, others for some of its heads; one read and
    one write per value, cached launcher, PDL
Ops: latent_rope_cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.latent_rope_cache import LatentRopeCacheInputs
from modelmill.ops.quant_types import QUANT_MAX
from modelmill.ops.triton.common.device import next_power_of_two, supports_fp8
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.dtype_convert import amax_to_scale, round_to_dtype
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_RANK, MAX_ROPE_DIM = 2048, 256
CHANNEL_PAIRS_PER_PROGRAM = 512  # pairs of channels of queries that a program rotates


def supports(q: torch.Tensor, latent: torch.Tensor, inputs: LatentRopeCacheInputs) -> bool:
    """Rows of one dtype with contiguous channels, pages of it or with scales; see Range."""
    weight, k_cache, slots, cos, sin, _, _, k_scale = inputs
    rope_dim, pages = 2 * cos.shape[1], k_cache.dtype
    if k_scale is None:
        stores = pages is q.dtype
    else:
        stores = k_scale.is_contiguous() and (
            pages is torch.int8 or (pages is torch.float8_e4m3fn and supports_fp8(q.device))
        )
    return (
        stores
        and q.numel() > 0
        and q.dtype is latent.dtype is weight.dtype
        and q.stride(2) == latent.stride(1) == weight.stride(0) == k_cache.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.dtype is sin.dtype is torch.float32
        and slots.dtype is torch.int64
        and slots.is_contiguous()
        and len(weight) <= MAX_RANK
        and 0 < rope_dim <= min(MAX_ROPE_DIM, q.shape[2])
        and latent.shape[1] == k_cache.shape[3] == len(weight) + rope_dim
    )


def run(q: torch.Tensor, latent: torch.Tensor, inputs: LatentRopeCacheInputs) -> torch.Tensor:
    """Run the op; negative slots are skipped on every device."""
    weight, k_cache, slots, cos, sin, interleaved, eps, k_scale = inputs
    tokens, heads, query_dim = q.shape
    half, block = next_power_of_two(cos.shape[1]), next_power_of_two(len(weight))
    share = max(1, min(CHANNEL_PAIRS_PER_PROGRAM // half, next_power_of_two(heads)))
    pdl = pdl_launch_options(q.device, tokens)
    strides = (q.stride(0), q.stride(1), latent.stride(0), k_cache.stride(0), k_cache.stride(2))
    _launcher(
        (tokens, 1 + -(-heads // share), 1),
        (q, latent, weight, k_cache, latent if k_scale is None else k_scale, slots, cos, sin),
        (*strides, eps),
        strides,
        (
            heads, query_dim, len(weight), 2 * cos.shape[1], k_cache.shape[2], interleaved,
            0.0 if k_scale is None else QUANT_MAX[k_cache.dtype], share, half, block, pdl["PDL"],
        ),
        {
            "num_warps": max(1, min(4, max(share * half, block) // 128)),
            "launch_pdl": pdl["launch_pdl"],
        },
    )  # fmt: skip
    return q


@triton.jit
def _kernel(
    q_ptr, latent_ptr, weight_ptr, k_ptr, k_scale_ptr, slots_ptr, cos_ptr, sin_ptr,
    q_stride, head_stride, latent_stride, page_stride, token_stride, eps,
    HEADS: tl.constexpr, QUERY_DIM: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr, SHARE: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, 0): the token's row of the cache; (token, 1 + n): SHARE of its heads."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    pair_valid = pair < ROPE_DIM // 2
    slot = tl.load(slots_ptr + token)
    pdl_wait_and_trigger(PDL)
    angle = token * (ROPE_DIM // 2) + pair
    cos = tl.load(cos_ptr + angle, mask=pair_valid, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=pair_valid, other=0.0)
    if part == 0:
        row_ptr = latent_ptr + token * latent_stride
        row, first, second = _norm_and_rotate(
            row_ptr, weight_ptr, pair, pair_valid, cos, sin, eps, RANK, ROPE_DIM, INTERLEAVED, BLOCK
        )
        d = tl.arange(0, BLOCK)
        cache_dtype: tl.constexpr = k_ptr.dtype.element_ty
        if LARGEST > 0.0:
            # The reference rounds the values in the activations' dtype; so does this kernel.
            row, first, second = row.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
            pair_amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=0)
            amax = tl.maximum(tl.max(tl.abs(row), axis=0), pair_amax)
            scale = amax_to_scale(amax + tl.zeros([1], tl.float32), LARGEST)
            pair_scale = scale + tl.zeros([HALF], tl.float32)
            row = tl.div_rn(row, scale + tl.zeros([BLOCK], tl.float32))
            row = round_to_dtype(row, cache_dtype, LARGEST)
            first = round_to_dtype(tl.div_rn(first, pair_scale), cache_dtype, LARGEST)
            second = round_to_dtype(tl.div_rn(second, pair_scale), cache_dtype, LARGEST)
            at = slot + tl.arange(0, 1)
            tl.store(k_scale_ptr + at, scale, mask=at >= 0)
        else:
            row, first, second = row.to(cache_dtype), first.to(cache_dtype), second.to(cache_dtype)
        target = k_ptr + (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
        # blocks, because Triton 3.9's interpreter does not accept a scalar comparison in a mask
        tl.store(target + d, row, mask=(d < RANK) & (slot + d * 0 >= 0))
        stored = pair_valid & (slot + pair * 0 >= 0)
        _store_pairs(target + RANK, first, second, pair, stored, ROPE_DIM, INTERLEAVED)
    else:
        head = ((part - 1) * SHARE + tl.arange(0, SHARE))[:, None]
        ends = q_ptr + token * q_stride + head * head_stride + (QUERY_DIM - ROPE_DIM)
        valid = (head < HEADS) & pair_valid[None, :]
        a, b = _rotate_pairs(
            ends, pair[None, :], valid, cos[None, :], sin[None, :], ROPE_DIM, INTERLEAVED
        )
        _store_pairs(ends, a, b, pair[None, :], valid, ROPE_DIM, INTERLEAVED)


@triton.jit
def _norm_and_rotate(
    row_ptr, weight_ptr, pair, pair_valid, cos, sin, eps, RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The normed latent vector [BLOCK], and the channels of each pair of the rotated key."""
    first, second = _rotate_pairs(row_ptr + RANK, pair, pair_valid, cos, sin, ROPE_DIM, INTERLEAVED)
    d = tl.arange(0, BLOCK)
    x = tl.load(row_ptr + d, mask=d < RANK, other=0.0)
    weight = tl.load(weight_ptr + d, mask=d < RANK, other=0.0).to(tl.float32)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / RANK + eps)
    normed = (x32 * scale).to(x.dtype).to(tl.float32)
    return (normed * weight).to(x.dtype), first, second


@triton.jit
def _pair_offsets(pair, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of a pair."""
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    else:  # noqa: RET505  Triton compiles code after a return too
        return pair, pair + ROPE_DIM // 2


@triton.jit
def _rotate_pairs(
    x_ptr, pair, valid, cos, sin, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """The channels of each pair, rotated and rounded."""
    first_at, second_at = _pair_offsets(pair, ROPE_DIM, INTERLEAVED)
    a = tl.load(x_ptr + first_at, mask=valid, other=0.0)
    b = tl.load(x_ptr + second_at, mask=valid, other=0.0)
    first, second = a.to(tl.float32), b.to(tl.float32)
    return (first * cos - second * sin).to(a.dtype), (second * cos + first * sin).to(a.dtype)


@triton.jit
def _store_pairs(
    x_ptr, first, second, pair, valid, ROPE_DIM: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Write the channels of each pair to their places."""
    first_at, second_at = _pair_offsets(pair, ROPE_DIM, INTERLEAVED)
    tl.store(x_ptr + first_at, first, mask=valid)
    tl.store(x_ptr + second_at, second, mask=valid)


_launcher = CachedLauncher(_kernel)
