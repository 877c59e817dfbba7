"""Rotary angles of a step in one launch, instead of ten torch ops at the start of every step.

Computes: cos[T, D / 2] and sin[T, D / 2] of positions and a table of frequencies
Dtypes: angles float32, rounded as float32, float16 or bfloat16
Layout: contiguous
Range: any M
Technique: elementwise, cached launcher, PDL
Ops: rope_cos_sin
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from modelmill.ops.rope_cos_sin import RopeCosSinInputs
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

VALUES_PER_PROGRAM = 512  # cos and sin values per program
ROUNDING_CODES_BY_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def supports(inputs: RopeCosSinInputs) -> bool:
    """Contiguous tensors with at least one token."""
    positions, keys, table, _, _, dtype = inputs
    packed = positions.is_contiguous() and keys.is_contiguous() and table.is_contiguous()
    return (
        packed
        and positions.numel() > 0
        and table.dtype == torch.float32
        and dtype in ROUNDING_CODES_BY_DTYPE
    )


def run(
    inputs: RopeCosSinInputs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the op with the Triton kernel; same contract as the reference."""
    positions, keys, table, factor, logn, dtype = inputs
    tokens, half = positions.shape[0], table.shape[1]
    cos = torch.empty((tokens, half), dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    logn_factors = (
        None if logn is None else torch.empty(tokens, dtype=torch.float32, device=positions.device)
    )
    padded_half = next_power_of_two(half)
    rows = min(max(1, VALUES_PER_PROGRAM // padded_half), next_power_of_two(tokens))
    pdl = pdl_launch_options(positions.device, tokens)
    _launcher(
        (-(-tokens // rows), 1, 1),
        (positions, keys, table, cos, sin, cos if logn_factors is None else logn_factors),
        (tokens, factor, 1.0 if logn is None else 1.0 / math.log(logn)),
        (),
        (
            half,
            rows,
            padded_half,
            len(table) > 1,
            logn_factors is not None,
            ROUNDING_CODES_BY_DTYPE[dtype],
            pdl["PDL"],
        ),
        {"num_warps": max(1, min(4, rows * padded_half // 128)), "launch_pdl": pdl["launch_pdl"]},
    )
    return cos, sin, logn_factors


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    positions_ptr, keys_ptr, table_ptr, cos_ptr, sin_ptr, logn_ptr, tokens, factor, inverse,
    HALF: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, KEYED: tl.constexpr,
    GROWS: tl.constexpr,
    ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDE)
    row_valid = row < tokens
    pdl_wait_and_trigger(PDL)
    position = tl.load(positions_ptr + row, mask=row_valid, other=0).to(tl.float32)
    at = column[None, :] + tl.zeros((ROWS, 1), tl.int64)
    if KEYED:
        at += tl.load(keys_ptr + row, mask=row_valid, other=0)[:, None] * HALF
    angle = position[:, None] * tl.load(table_ptr + at, mask=column[None, :] < HALF, other=0.0)
    out = row.to(tl.int64)[:, None] * HALF + column[None, :]
    inside = row_valid[:, None] & (column[None, :] < HALF)
    tl.store(cos_ptr + out, tl.cos(angle) * factor, mask=inside)
    tl.store(sin_ptr + out, tl.sin(angle) * factor, mask=inside)
    if GROWS:
        logn_factor = tl.maximum(tl.log(position + 1.0) * inverse, 1.0)
        if ROUNDED == 1:
            logn_factor = logn_factor.to(tl.float16).to(tl.float32)
        if ROUNDED == 2:
            logn_factor = logn_factor.to(tl.bfloat16).to(tl.float32)
        tl.store(logn_ptr + row, logn_factor, mask=row_valid)


_launcher = CachedLauncher(_kernel)
