"""RMSNorm of the latent vector, RoPE of key and queries, and KV-cache write of MLA in one op.

Multi-head latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1.
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

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class LatentRopeCacheInputs(NamedTuple):
    """The norm, the rotation, and where the latent vector and the rotated key are stored.

    Attributes:
        weight: [rank], of the norm, in the rows' dtype.
        k_cache: [pages, 1, page_size, rank + rope_dim], written in place; int8 and float8_e4m3fn
            values are those of ``quant_types.quantize_per_row`` over each token.
        slots: [T] int64, page·page_size + offset; negative slots are not written (padding).
        cos: [T, rope_dim/2] float32, with YaRN's attention factor in it.
        sin: as cos.
        interleaved: whether channels 2i and 2i + 1 rotate together, not i and i + rope_dim/2.
        eps: of the norm.
        k_scale: [pages, 1, page_size] float32, written with caches of int8 or float8_e4m3fn.
    """

    weight: torch.Tensor
    k_cache: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    eps: float
    k_scale: torch.Tensor | None = None


def _count_latent_rows_and_angles(args: Mapping[str, Any], _: torch.Tensor) -> OpCost:
    """Count the latent rows and what is stored of them, the angles, and the queries' ends."""
    q, latent, cos = args["q"], args["latent"], args["cos"]
    rotated = q.shape[0] * q.shape[1] * 2 * cos.shape[1] * q.element_size()
    stored = len(latent) * key_bytes_per_token(args["k_cache"])
    return OpCost(nbytes(latent, args["weight"], cos, args["sin"]) + 2 * rotated + stored)


DECLARATION = OpDeclaration(
    fuses=("rms_norm",),
    optional=True,
    inputs=LatentRopeCacheInputs,
    operands=("q", "latent", "inputs"),
    cost=_count_latent_rows_and_angles,
)


class SlotPageIndices(NamedTuple):
    """Where in the pages the tokens of a step are stored; padding is not.

    Attributes:
        page: [T] int64.
        offset: [T] int64, in the page.
        source: [T] int64, for each token the one that is stored in its place: itself, or for
            padding another one, so that nothing is stored for padding and the host need not know
            where it is; None: no token is padding.
        is_padding: [] bool: whether all tokens are padding; then nothing is stored.
    """

    page: torch.Tensor
    offset: torch.Tensor
    source: torch.Tensor | None
    is_padding: torch.Tensor

    @staticmethod
    def from_slots(slots: torch.Tensor, page_size: int) -> SlotPageIndices:
        """The places of slots [T] int64."""
        source = None
        if slots.is_cuda or bool((slots < 0).any()):
            source = padding_safe_token_indices(slots)
            slots = slots[source]
        page = slots.div(page_size, rounding_mode="floor")
        return SlotPageIndices(page, slots % page_size, source, slots[0] < 0)


def padding_safe_token_indices(slots: torch.Tensor) -> torch.Tensor:
    """For each token itself, or for padding (slots below 0) the first that is none.

    If all tokens are padding, it is the first one, whose slot is below 0.
    """
    valid = slots >= 0
    tokens = torch.arange(len(slots), device=slots.device)
    return torch.where(valid, tokens, valid.int().argmax())


def latent_rope_cache(
    q: torch.Tensor, latent: torch.Tensor, inputs: LatentRopeCacheInputs
) -> torch.Tensor:
    """Norm the latent vector, rotate the key behind it and the ends of the queries, and store.

    Args:
        q: [T, heads, query_dim], of which the last rope_dim channels are rotated in place.
        latent: [T, rank + rope_dim], the latent vector and the key as they are projected.
        inputs: the norm, the angles, the pages and slots.

    Returns:
        q.
    """
    weight, k_cache, slots, cos, sin, interleaved, eps, k_scale = inputs
    rank, rope_dim = len(weight), 2 * cos.shape[1]
    normed = rms_norm(latent[:, :rank], weight, eps)
    row = torch.cat((normed, latent[:, rank:]), -1)[:, None]
    row = rotate_channels_from(row, rank, cos, sin, interleaved=interleaved)
    store_rows_in_pages(row, k_cache, k_scale, SlotPageIndices.from_slots(slots, k_cache.shape[2]))
    begin = q.shape[2] - rope_dim
    q[..., begin:] = rotate_channels_from(q[..., begin:], 0, cos, sin, interleaved=interleaved)
    return q


def rotate_channels_from(
    x: torch.Tensor, begin: int, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the channels of x [T, heads, D] from ``begin`` on; the others pass through."""
    cos, sin = cos[:, None], sin[:, None]
    turned = x[..., begin:].float()
    axis = -1 if interleaved else -2
    shape = (-1, 2) if interleaved else (2, -1)
    first, second = turned.unflatten(-1, shape).unbind(axis)
    both = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
    return torch.cat((x[..., :begin], both.flatten(-2).to(x.dtype)), -1)


def store_rows_in_pages(
    row: torch.Tensor, k_cache: torch.Tensor, k_scale: torch.Tensor | None, places: SlotPageIndices
) -> None:
    """Store rows [T, 1, D] in pages, quantized if these have scales."""
    page, offset, source, is_padding = places
    if source is not None:
        row = row[source]
    if k_scale is not None:
        row, scale = quantize_per_row(row, k_cache.dtype)
        k_scale[page, :, offset] = torch.where(is_padding, k_scale[page, :, offset], scale)
    # bytes, since not every dtype has ``where``
    stored, row = k_cache.view(torch.uint8), row.to(k_cache.dtype).view(torch.uint8)
    stored[page, :, offset] = torch.where(is_padding, stored[page, :, offset], row)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Both orders of pairs, sizes that are no powers of two, padding, pages of 16 and 8 bits.

    DeepSeek-V2-Lite's and V3's sizes where there is a GPU.
    """
    shapes = [(1, 3, 24, 40, 12, 8), (5, 4, 100, 30, 6, 16), (3, 20, 64, 64, 32, 16)]
    if device != "cpu":
        shapes += [
            (1, 16, 512, 192, 64, 16),
            (64, 128, 512, 192, 64, 16),
            (4096, 16, 512, 192, 64, 16),
        ]
    for number, (tokens, heads, rank, query_dim, rope_dim, page) in enumerate(shapes):
        sizes = heads, rank, query_dim, rope_dim, page
        yield random_case(tokens, sizes, device, dtype, number, interleaved=number % 2 == 0)


def random_case(
    tokens: int,
    sizes: tuple[int, int, int, int, int],
    device: str,
    dtype: torch.dtype,
    seed: int,
    *,
    interleaved: bool,
    padding: bool = False,
) -> Case:
    """A case of (heads, rank, channels of a query, rotated ones, page size), shuffled slots.

    padding: every second token is.
    """
    heads, rank, query_dim, rope_dim, page = sizes
    pages = -(-tokens // page) + 2
    order = torch.randperm(pages * page, generator=torch.Generator().manual_seed(seed))
    slots = order[:tokens].clone()
    if padding:
        slots[::2] = -1
    angle = randn(tokens, rope_dim // 2, device=device, dtype=torch.float32, seed=seed, scale=3.0)
    latent = randn(tokens, rank + rope_dim, device=device, dtype=dtype, seed=seed + 1, scale=2.0)
    q = randn(tokens, heads, query_dim, device=device, dtype=dtype, seed=seed + 2)
    k_cache = torch.full((pages, 1, page, rank + rope_dim), 7.0, device=device, dtype=dtype)
    args = {
        "q": q,
        "latent": latent,
        "weight": randn(rank, device=device, dtype=dtype, seed=seed + 3) + 1,
        "k_cache": k_cache,
        "slots": slots.to(device),
        "cos": 1.2 * angle.cos(),
        "sin": 1.2 * angle.sin(),
        "interleaved": interleaved,
        "eps": 1e-6,
    }
    rotated = 2 * tokens * heads * rope_dim * dtype.itemsize
    moved = 2 * nbytes(latent) + rotated + nbytes(angle, angle)
    name = f"{tokens}x{heads}x{query_dim}-{rank}+{rope_dim}"
    return Case(f"{name}-padded" if padding else name, args, moved, writes=("q", "k_cache"))
