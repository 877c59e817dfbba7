"""The product that makes queries, keys and values, and what rope_cache does to them, in one op."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.linear import linear
from modelmill.ops.rope_cache import rope_cache

TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}


def rope_cache_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """rope_cache of x Wᵀ (+ b), without norms of heads or caches of 8 bits; all else as there.

    x: [T, K]; weight: [(heads + 2·kv_heads)·D, K]; bias: [(heads + 2·kv_heads)·D] or None. Returns q: [T, heads, D].
    """
    return rope_cache(linear(x, weight, bias), k_cache, v_cache, slots, heads, cos, sin, q_scale)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """MHA, GQA, MQA; with and without rotation, bias and logn; padding; a 7B layer only on a GPU."""
    shapes = [(9, 3, 1, 72, 16), (300, 5, 2, 264, 8)]
    if device != "cpu":
        shapes += [(1024, 32, 32, 4096, 16), (4096, 32, 32, 4096, 16), (1000, 28, 4, 520, 32)]
    for number, (tokens, heads, kv_heads, hidden, page) in enumerate(shapes):
        width, pages = (heads + 2 * kv_heads) * 128, tokens // page + 3
        generator = torch.Generator().manual_seed(number)
        slots = torch.randperm(pages * page, generator=generator)[:tokens]
        if number == 1:
            slots[3::7] = -1
        angle = randn(tokens, 64, device=device, dtype=torch.float32, seed=number, scale=3.0)
        x = randn(tokens, hidden, device=device, dtype=dtype, seed=number + 10)
        weight = randn(width, hidden, device=device, dtype=dtype, seed=number + 20, scale=hidden**-0.5)
        bias = randn(width, device=device, dtype=dtype, seed=number) if number != 1 else None
        caches = [torch.full((pages, kv_heads, page, 128), 7.0, device=device, dtype=dtype) for _ in range(2)]
        args = {"x": x, "weight": weight, "bias": bias, "k_cache": caches[0], "v_cache": caches[1]}
        args |= {"slots": slots.to(device), "heads": heads}
        if number != 1:
            args |= {"cos": angle.cos(), "sin": angle.sin()}
        if number in (0, 4):
            args |= {"q_scale": torch.linspace(1.0, 1.5, tokens, device=device)}
        moved = nbytes(x, weight, bias) + tokens * width * x.element_size()
        flops = 2 * tokens * hidden * width
        name = f"{tokens}x{hidden}->{heads}/{kv_heads}x128"
        yield Case(name, args, moved, flops, writes=("k_cache", "v_cache"))
