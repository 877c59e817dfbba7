"""Pairs of a token and an expert sorted by expert, in two launches and without atomics.

Computes: sorted_token_ids and expert_ids of topk_ids[T, top_k]
Dtypes: int32
Layout: packed; each expert's pairs padded to whole blocks
Range: any number of tokens; E ≤ 1024
Technique: a histogram for each chunk of pairs, then ranks within chunks by comparison and each
    pair's place by a gather through shared memory, PDL
Ops: moe_align_block_size

The order of an expert's pairs is that of the tokens in every run: nothing depends on which program
comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.moe_align_block_size import NO_EXPERT, max_expert_blocks
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_EXPERTS = 1024
_PAIRS_PER_PROGRAM = 128  # pairs of a program
_PADDING_PER_PROGRAM, _BLOCKS_PER_PROGRAM = (
    512,
    16,
)  # padding, and blocks, that a program writes at once
_MAX_COUNTS_IN_REGISTERS = 8192  # counts in registers at once


def supports(topk_ids: torch.Tensor, block_size: int, experts: int) -> bool:
    """Packed int32 ids."""
    packed = topk_ids.dtype == torch.int32 and topk_ids.is_contiguous()
    return packed and topk_ids.numel() > 0 and experts <= MAX_EXPERTS


def run(topk_ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op."""
    pairs, device = topk_ids.numel(), topk_ids.device
    blocks, chunks = max_expert_blocks(pairs, block_size, experts), -(-pairs // _PAIRS_PER_PROGRAM)
    block_e = max(16, next_power_of_two(experts))
    counts = torch.empty((chunks, block_e), dtype=torch.int32, device=device)
    sorted_ids = torch.empty(blocks * block_size, dtype=torch.int32, device=device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=device)
    pdl = pdl_launch_options(device, len(topk_ids))
    options = {"num_warps": 4, "launch_pdl": pdl["launch_pdl"]}
    _count_launcher(
        (chunks, 1, 1), (topk_ids, counts, sorted_ids), (pairs, len(sorted_ids), chunks), (),
        (NO_EXPERT, _PADDING_PER_PROGRAM, block_e, _PAIRS_PER_PROGRAM, pdl["PDL"]), options,
    )  # fmt: skip
    _scatter_launcher(
        (chunks, 1, 1), (topk_ids, counts, sorted_ids, expert_ids), (pairs, chunks, blocks), (),
        (
            block_size, NO_EXPERT, _BLOCKS_PER_PROGRAM, block_e,
            max(1, _MAX_COUNTS_IN_REGISTERS // block_e), _PAIRS_PER_PROGRAM,
            pdl["PDL"],
        ),
        options,
    )  # fmt: skip
    return sorted_ids, expert_ids


@triton.jit(do_not_specialize=["pairs", "length", "chunks"])
def _count_kernel(
    ids_ptr, counts_ptr, sorted_ptr, pairs, length, chunks,
    NONE: tl.constexpr, FILL: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Counts of a chunk by expert; fills a part of the sorted pairs with padding."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    pdl_wait_and_trigger(PDL)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=NONE)
    live = ids != NONE
    counts = tl.histogram(tl.where(live, ids, 0), BLOCK_E, mask=live)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), counts)
    for start in range(chunk * FILL, length, chunks * FILL):
        at = start + tl.arange(0, FILL)
        tl.store(sorted_ptr + at, tl.zeros([FILL], tl.int32) + pairs, mask=at < length)


@triton.jit(do_not_specialize=["pairs", "chunks", "blocks"])
def _scatter_kernel(
    ids_ptr, counts_ptr, sorted_ptr, experts_ptr, pairs, chunks, blocks,
    BLOCK_SIZE: tl.constexpr, NONE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Puts each pair of a chunk in its place; names the experts of a part of the blocks."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    pdl_wait_and_trigger(PDL)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, chunks, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = tl.load(
            counts_ptr + row[:, None] * BLOCK_E + expert[None, :],
            mask=(row < chunks)[:, None], other=0,
        )  # fmt: skip
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((row < chunk)[:, None], counts, 0), axis=0)
    padded = (total + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    ends = tl.cumsum(padded, axis=0)
    used = tl.sum(padded, axis=0)
    for first in range(chunk * BLOCKS, blocks, chunks * BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        passed = (ends[None, :] <= block[:, None] * BLOCK_SIZE).to(tl.int32)
        owner = tl.where(block * BLOCK_SIZE < used, tl.sum(passed, axis=1), NONE)
        tl.store(experts_ptr + block, owner, mask=block < blocks)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=NONE)
    live = ids != NONE
    other = chunk * CHUNK + tl.arange(0, CHUNK)
    others = tl.load(ids_ptr + other, mask=other < pairs, other=BLOCK_E)
    same = (others[None, :] == ids[:, None]) & (other[None, :] < pair[:, None])
    rank = tl.sum(same.to(tl.int32), axis=1)
    start = tl.gather(ends - padded + before, tl.where(live, ids, 0), axis=0)
    tl.store(sorted_ptr + start + rank, pair, mask=live)


_count_launcher = CachedLauncher(_count_kernel)
_scatter_launcher = CachedLauncher(_scatter_kernel)
