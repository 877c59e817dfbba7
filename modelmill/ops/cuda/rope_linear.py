"""Queries, keys and values of prompts by rope_rows.cu: product, rotation and KV-cache write in one kernel."""

from __future__ import annotations

import struct

import torch

from modelmill.ops.cuda import build, launch, products
from modelmill.ops.cuda.products import DEPTH, MANY_THREADS, TILE_ROWS, TYPES, readable

WIDE = 256  # rows of the weight of a tile
DIMS = (64, 128)
LEAST_FILLED = 0.93  # measured: at 0.97 4 to 14 % faster than cuBLAS and the rotation, at 0.91 as fast, at 0.87 slower
_MOST = 1 << 31  # slots, and values of the projection: they are counted in 32 bits


def available(kind: str) -> str | None:
    """None where the kernel serves devices of this kind; else why not. Compiles one form, once a machine."""
    return build.serves(kind, "rope_rows", macros(128, biased=True, dtype=torch.bfloat16))


def macros(dim: int, *, biased: bool, dtype: torch.dtype) -> tuple[str, ...]:
    """As the compiler takes them."""
    return (f"DIM={dim}", f"BIAS={int(biased)}", f"BAND={products.BAND}", *TYPES[dtype])


def supports(
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
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> bool:
    """16 bits, also of the pages, which have 2^n tokens each; heads of 64 or 128 without norms of their own; prompts
    that fill the multiprocessors with tiles."""
    if any(each is not None for each in (q_norm, k_norm, k_scale, v_scale)) or (cos is None) != (sin is None):
        return False
    if x.dim() != 2 or not readable(x, weight, bias) or k_cache.shape[3] not in DIMS:
        return False
    if bias is not None and bias.data_ptr() % 16:
        return False
    whole = all(each is None or each.is_contiguous() for each in (slots, cos, sin, q_scale))
    pages = (k_cache, v_cache)
    if not whole or any(each.dtype is not x.dtype or each.data_ptr() % 16 for each in pages):
        return False
    strides, page = k_cache.stride(), k_cache.shape[2]
    aligned = strides == v_cache.stride() and strides[3] == 1 and not any(step % 8 for step in strides[:3])
    if not aligned or page & (page - 1) or max(k_cache.shape[0] * page, x.shape[0] * weight.shape[0]) >= _MOST:
        return False
    return worth(x.shape[0], weight.shape[0], launch.multiprocessors(x.get_device()))


def worth(rows: int, held: int, multiprocessors: int) -> bool:
    """Whether one kernel is faster than cuBLAS and the rotation behind it."""
    return rows >= products.LEAST_MANY and products.filled(rows, held, multiprocessors, (WIDE,)) >= LEAST_FILLED


def forms(x: torch.Tensor, weight: torch.Tensor, most: int) -> list[int]:
    """The least number of rows, up to ``most``, that is served: each of them is the same kernel's."""
    if not readable(x.new_empty((1, x.shape[1])), weight, None):
        return []
    sizes = (weight.shape[0], launch.multiprocessors(x.get_device()))
    served = (rows for rows in range(products.LEAST_MANY, most + 1, 2 * TILE_ROWS) if worth(rows, *sizes))
    return [least for least in [next(served, None)] if least is not None]


def run(
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
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference, sums in float32; negative slots are left out."""
    assert q_norm is None, "see supports"
    assert k_scale is None, "see supports"
    (tokens, columns), kv_heads, dim = x.shape, k_cache.shape[1], k_cache.shape[3]
    rows = (heads + 2 * kv_heads) * dim
    q = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    device = x.get_device()
    with torch.cuda.device(x.device):
        desks, biases, barriers = 2 * 64 * 128 * 2, 2 * WIDE * 2, 4 * 16 + 6 * 8
        shared = 4 * (TILE_ROWS + WIDE) * DEPTH * 2 + desks + biases + barriers
        named = macros(dim, biased=bias is not None, dtype=x.dtype)
        kernel = launch.kernel("rope_rows", "rope_rows", named, MANY_THREADS, shared, device)
        pairs = products.pairs_of(tokens, rows, WIDE)
        blocks = 2 * min(launch.multiprocessors(device) // 2, pairs)
        where = launch.addresses(bias, q, k_cache, v_cache, slots, cos, sin, q_scale)
        sizes = (tokens, rows, -(-columns // DEPTH), -(-rows // WIDE), WIDE, WIDE // 2)
        heads_of = (heads, kv_heads, k_cache.shape[2].bit_length() - 1, 0)
        work = struct.pack("=8Q3q10i", *where, *k_cache.stride()[:3], *sizes, *heads_of)
        kernel.launch(blocks, products.box_map(x, TILE_ROWS), products.box_map(weight, WIDE // 2), work, early=True)
    return q
