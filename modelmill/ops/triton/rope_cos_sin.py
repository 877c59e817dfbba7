"""The angles of a step in one launch: torch's ops are ten, at the beginning of every step."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import power_of_two
from modelmill.ops.triton.fast_launch import CachedLauncher
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait

VALUES_PER_PROGRAM = 512  # of a program
ROUNDING_MODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def supports(
    positions: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    factor: float = 1.0,
    logn: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Packed tensors; at least one token."""
    packed = positions.is_contiguous() and keys.is_contiguous() and table.is_contiguous()
    return (
        packed
        and positions.numel() > 0
        and table.dtype == torch.float32
        and dtype in ROUNDING_MODES
    )


def run(
    positions: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    factor: float = 1.0,
    logn: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As the reference."""
    tokens, half = positions.shape[0], table.shape[1]
    cos = torch.empty((tokens, half), dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    growth = (
        None if logn is None else torch.empty(tokens, dtype=torch.float32, device=positions.device)
    )
    wide = power_of_two(half)
    rows = min(max(1, VALUES_PER_PROGRAM // wide), power_of_two(tokens))
    early = pdl_launch_options(positions.device, tokens)
    _launcher(
        (-(-tokens // rows), 1, 1),
        (positions, keys, table, cos, sin, cos if growth is None else growth),
        (tokens, factor, 1.0 if logn is None else 1.0 / math.log(logn)),
        (),
        (half, rows, wide, len(table) > 1, growth is not None, ROUNDING_MODES[dtype], early["PDL"]),
        {"num_warps": max(1, min(4, rows * wide // 128)), "launch_pdl": early["launch_pdl"]},
    )
    return cos, sin, growth


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    positions_ptr, keys_ptr, table_ptr, cos_ptr, sin_ptr, growth_ptr, tokens, factor, inverse,
    HALF: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, KEYED: tl.constexpr,
    GROWS: tl.constexpr,
    ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    there = row < tokens
    pdl_wait(PDL)
    position = tl.load(positions_ptr + row, mask=there, other=0).to(tl.float32)
    at = column[None, :] + tl.zeros((ROWS, 1), tl.int64)
    if KEYED:
        at += tl.load(keys_ptr + row, mask=there, other=0)[:, None] * HALF
    angle = position[:, None] * tl.load(table_ptr + at, mask=column[None, :] < HALF, other=0.0)
    out = row.to(tl.int64)[:, None] * HALF + column[None, :]
    inside = there[:, None] & (column[None, :] < HALF)
    tl.store(cos_ptr + out, tl.cos(angle) * factor, mask=inside)
    tl.store(sin_ptr + out, tl.sin(angle) * factor, mask=inside)
    if GROWS:
        growth = tl.maximum(tl.log(position + 1.0) * inverse, 1.0)
        if ROUNDED == 1:
            growth = growth.to(tl.float16).to(tl.float32)
        if ROUNDED == 2:
            growth = growth.to(tl.bfloat16).to(tl.float32)
        tl.store(growth_ptr + row, growth, mask=there)


_launcher = CachedLauncher(_kernel)
