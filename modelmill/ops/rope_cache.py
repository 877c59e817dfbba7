"""Per-head norm of q and k (Qwen3), RoPE, logn scaling and KV-cache write in one op.

RoPE: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from modelmill.ops.attention_cost import key_bytes_per_token
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.op_cost import OpCost
from modelmill.ops.quant_types import quantize_per_row
from modelmill.ops.rms_norm import rms_norm
from modelmill.ops.rope_cache_support import make_rope_cache_problem, make_rope_guard

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


class RopeCacheInputs(NamedTuple):
    """Where keys and values are stored, and what is done to q and k before.

    Attributes:
        k_cache: [pages, kv_heads, page_size, D], written in place; int8 and float8_e4m3fn values
            are those of ``quant_types.quantize_per_row`` over each token's head.
        v_cache: as k_cache.
        slots: [T] int64, page·page_size + offset; negative slots are not written (padding).
        heads: number of query heads.
        cos: [T, D/2] float32, or None for models without RoPE.
        sin: as cos.
        q_scale: [T] float32, multiplied with q after the rotation (logn), or None.
        q_norm: [D] or None.
        k_norm: [D] or None.
        eps: of the norms.
        k_scale: [pages, kv_heads, page_size] float32, written with caches of int8 or float8_e4m3fn.
        v_scale: as k_scale.
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    heads: int
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def rope_cache_bytes(args: Mapping[str, Any], result: torch.Tensor) -> int:
    """Bytes of the angles, the queries that are returned, and the stored keys and values."""
    stored = args["slots"].numel() * 2 * key_bytes_per_token(args["k_cache"])
    return nbytes(args.get("cos"), args.get("sin"), result) + stored


DECLARATION = OpDeclaration(
    inputs=RopeCacheInputs,
    problem=make_rope_cache_problem,
    operands=("qkv", "inputs"),
    guard=make_rope_guard,
    cost=lambda args, result: OpCost(nbytes(args["qkv"]) + rope_cache_bytes(args, result)),
)


def rope_cache(qkv: torch.Tensor, inputs: RopeCacheInputs) -> torch.Tensor:
    """Split qkv, norm q and k per head, rotate, scale q, and store k and v.

    Args:
        qkv: [T, (heads + 2·kv_heads)·D], q | k | v.
        inputs: the pages, slots, angles and norms.

    Returns:
        q [T, heads, D] in qkv's dtype.
    """
    k_cache, v_cache, slots, heads, cos, sin, q_scale, q_norm, k_norm, eps = inputs[:10]
    k_scale, v_scale = inputs[10:]
    _, kv_heads, page_size, dim = k_cache.shape
    tokens = qkv.shape[0]
    parts = qkv.view(tokens, heads + 2 * kv_heads, dim)
    q, k, v = parts.split([heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        if cos is not None and sin is not None:
            q, k = _apply_rope(q, cos, sin), _apply_rope(k, cos, sin)
    elif cos is not None and sin is not None:  # q and k together: half as many calls
        q, k = _apply_rope(parts[:, : heads + kv_heads], cos, sin).split([heads, kv_heads], 1)
    if q_scale is not None:
        q = (q * q_scale[:, None, None]).to(qkv.dtype)
    page, offset = slots.div(page_size, rounding_mode="floor"), slots % page_size
    if not slots.is_cuda and bool((slots < 0).any()):
        keep = slots >= 0
        page = page[keep]
        offset = offset[keep]
        k = k[keep]
        v = v[keep]
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is not None:
            x, scale[page, :, offset] = quantize_per_row(x, cache.dtype)
        cache[page, :, offset] = x.to(cache.dtype)
    return q.contiguous()


def _apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + D/2) of x [T, heads, D]."""
    first, second = x.float().chunk(2, -1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * c - second * s, second * c + first * s), -1).to(x.dtype)


def random_cache_and_angles(
    tokens: int, kv_heads: int, dim: int, device: str, dtype: torch.dtype, seed: int, page: int = 16
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Pages with spare room, shuffled slots in them, and angles, for a case."""
    pages = -(-tokens // page) + 2
    slots = torch.randperm(pages * page, generator=torch.Generator().manual_seed(seed))[:tokens].to(
        device
    )
    k, v = (
        torch.full((pages, kv_heads, page, dim), 7.0, device=device, dtype=dtype) for _ in range(2)
    )
    angle = randn(tokens, dim // 2, device=device, dtype=torch.float32, seed=seed, scale=3.0)
    return {"k_cache": k, "v_cache": v, "slots": slots}, {"cos": angle.cos(), "sin": angle.sin()}


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """MHA, GQA, MQA; head sizes 8 to 128; with and without norms, RoPE, logn; shuffled slots."""
    shapes = ((1, 9, 3, 64), (13, 4, 4, 128), (5, 8, 1, 80), (32, 32, 32, 128), (3, 2, 2, 8))
    for number, (tokens, heads, kv_heads, dim) in enumerate(shapes):
        pages, angles = random_cache_and_angles(tokens, kv_heads, dim, device, dtype, number)
        qkv = randn(
            tokens, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype, seed=number + 10
        )
        args = {"qkv": qkv, "heads": heads, **pages}
        if number != 2:
            args |= angles
        if number in (1, 4):
            args |= {"q_scale": torch.linspace(1.0, 1.5, tokens, device=device)}
        if number in (3, 4):
            args |= {
                "q_norm": randn(dim, device=device, dtype=dtype, seed=1) + 1,
                "k_norm": randn(dim, device=device, dtype=dtype, seed=2) + 1,
            }
        name = f"{tokens}x{heads}/{kv_heads}x{dim}"
        yield Case(name, args, 2 * nbytes(qkv), writes=("k_cache", "v_cache"))
