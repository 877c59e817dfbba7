"""Sorts the pairs of a token and an expert by expert, each expert's padded to whole blocks.

Sizes depend on the shapes alone, so that no launch waits for the routing: the blocks that no expert
needs are marked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes
from modelmill.ops.declaration import OpDeclaration

DECLARATION = OpDeclaration()

TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}
NO_EXPERT = -1  # of a block that no expert needs


def max_expert_blocks(pairs: int, block_size: int, experts: int) -> int:
    """The most blocks that so many pairs may need."""
    if pairs <= experts:
        return pairs
    return min(pairs, experts + (pairs - experts) // block_size)


def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert; those of an expert keep their order.

    Args:
        topk_ids: [T, top_k] int32, the experts of each token, or NO_EXPERT, whose pairs are left
            out. Pair i is that of token i // top_k.
        block_size: pairs of a block.
        experts: how many there are.

    Returns:
        sorted_token_ids: [blocks · block_size] int32, pairs; T · top_k where a block is padded.
        expert_ids: [blocks] int32, the expert of each block, or NO_EXPERT.
    """
    flat = topk_ids.flatten().long()
    pairs, device = flat.numel(), flat.device
    blocks = max_expert_blocks(pairs, block_size, experts)
    flat = torch.where(flat == NO_EXPERT, experts, flat)  # last, in a bin of their own
    counts = torch.zeros(experts + 1, dtype=torch.long, device=device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts[:-1] + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    order = flat.argsort(stable=True)
    experts_sorted = flat[order]
    rank = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[experts_sorted]
    # pairs that are left out go to one place behind the end
    length = blocks * block_size
    sorted_ids = torch.full((length + 1,), pairs, dtype=torch.int32, device=device)
    firsts = torch.nn.functional.pad(ends - padded, (0, 1))
    places = torch.where(experts_sorted < experts, firsts[experts_sorted] + rank, length)
    sorted_ids[places] = order.int()
    starts = torch.arange(blocks, device=device) * block_size
    block_experts = torch.searchsorted(ends, starts, right=True)
    unused = torch.full_like(block_experts, NO_EXPERT)
    return sorted_ids[:-1], torch.where(starts < ends[-1], block_experts, unused).int()


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001  integers only
    """Experts without tokens, full and padded blocks, several chunks of pairs, others' experts."""
    shapes = [(1, 2, 8, 16), (7, 2, 4, 4), (150, 4, 5, 16), (40, 1, 300, 8)]
    if device != "cpu":
        shapes += [(32, 8, 128, 16), (64, 10, 512, 16)]
        shapes += [(4096, 8, 128, 128), (8192, 2, 8, 128)]
    for tokens, top_k, experts, block in shapes:
        draw = torch.Generator().manual_seed(tokens)
        scores = torch.rand(tokens, experts, generator=draw) + torch.linspace(0, 0.5, experts)
        ids = scores.topk(top_k, dim=-1).indices.int().to(device)
        args = {"topk_ids": ids, "block_size": block, "experts": experts}
        written = 4 * max_expert_blocks(ids.numel(), block, experts) * (block + 1)
        name = f"{tokens}x{top_k} of {experts} by {block}"
        yield Case(name, args, nbytes(ids) + written)
        own = experts // 2
        local = torch.where(ids < own, ids, NO_EXPERT)
        args = {"topk_ids": local, "block_size": block, "experts": own}
        written = 4 * max_expert_blocks(ids.numel(), block, own) * (block + 1)
        yield Case(f"{name}, {own} here", args, nbytes(ids) + written)
