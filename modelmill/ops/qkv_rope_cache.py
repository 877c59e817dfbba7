"""QKV projection, RoPE and KV-cache write of a prompt in one op (see ``rope_cache``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_support import make_dense_gemm_problem
from modelmill.ops.linear import linear
from modelmill.ops.op_cost import OpCost, product_cost
from modelmill.ops.rope_cache import (
    RopeCacheInputs,
    random_cache_and_angles,
    rope_cache,
    rope_cache_bytes,
)
from modelmill.ops.rope_cache_support import make_rope_inputs_check


def _count_projection_and_stores(args: Mapping[str, Any], result: torch.Tensor) -> OpCost:
    x, weight, bias = args["x"], args["weight"], args.get("bias")
    other_bytes = nbytes(x) + rope_cache_bytes(args, result)
    return product_cost(other_bytes, nbytes(weight, bias), 2 * x.numel() * weight.shape[0])


DECLARATION = OpDeclaration(
    fuses=("linear", "rope_cache"),
    optional=True,
    inputs=RopeCacheInputs,
    problem=lambda x, weight, bias, _: make_dense_gemm_problem(x, weight, bias),
    operands=("x", "weight", "bias", "inputs"),
    per_call="inputs",
    alike=make_rope_inputs_check,
    cost=_count_projection_and_stores,
)

TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def qkv_rope_cache(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: RopeCacheInputs
) -> torch.Tensor:
    """Apply ``rope_cache`` to x Wᵀ (+ bias), rounded to x's dtype as two separate ops would do.

    x: [T, K]; weight: [N, K] with N = (heads + 2·kv_heads)·D rows, q above k above v; bias: [N] or
    None. inputs: as in ``rope_cache``.

    Returns:
        q [T, heads, D].
    """
    return rope_cache(linear(x, weight, bias), inputs)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Prompts with and without bias, angles, logn; head sizes 64 and 128; 7B shape on GPUs only."""
    shapes = [(5, 72, 3, 1, 64), (300, 136, 2, 2, 128)]
    if device != "cpu":
        shapes += [
            (512, 520, 52, 6, 128),
            (1000, 1032, 33, 15, 64),
            (1024, 4096, 32, 32, 128),
            (4096, 4096, 32, 32, 128),
        ]
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: list[tuple[int, int, int, int, int]], device: str, dtype: torch.dtype, page: int = 16
) -> Iterator[Case]:
    """Cases of (tokens, K, heads, KV heads, head size) with shuffled slots in pages of ``page``."""
    for tokens, k, heads, kv_heads, dim in shapes:
        rows = (heads + 2 * kv_heads) * dim
        pages, angles = random_cache_and_angles(tokens, kv_heads, dim, device, dtype, tokens, page)
        args: dict[str, Any] = {
            "x": randn(tokens, k, device=device, dtype=dtype, seed=tokens + k),
            "weight": randn(rows, k, device=device, dtype=dtype, seed=k + rows, scale=k**-0.5),
            "bias": randn(rows, device=device, dtype=dtype, seed=rows)
            if heads % 32 or heads == kv_heads
            else None,
            "heads": heads,
            **pages,
        }
        if heads != 2:
            args |= angles
        if heads % 3 == 0:
            args |= {"q_scale": torch.linspace(1.0, 1.5, tokens, device=device)}
        read = [
            args.get(name) for name in ("x", "weight", "bias", "slots", "cos", "sin", "q_scale")
        ]
        moved = nbytes(*read) + tokens * rows * dtype.itemsize
        name = f"{tokens}x{k}->{heads}/{kv_heads}x{dim}"
        yield Case(name, args, moved, 2 * tokens * k * rows, writes=("k_cache", "v_cache"))
