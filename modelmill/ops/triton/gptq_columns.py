"""Columns rounded one after another, each passing its error on: the inner loop of GPTQ, a block of
columns a launch.

Written as torch operations this is a dozen launches a column. Rows do not know of each other: a
program holds some rows of the block in registers and walks through its columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import supports_fp8 as supports_fp8

ROWS_PER_PROGRAM = 8
ROUND_TO_INT = tl.constexpr(1.5 * 2**23)  # floats of this size have no fraction


def run(
    work: torch.Tensor,
    matrix: torch.Tensor,
    first_column: int,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    levels: int,
    values: torch.Tensor,
    propagated: torch.Tensor,
    refine: bool,
) -> None:
    """Round the columns first_column … first_column + width of ``work`` into ``values``; what each
    passes on goes to ``propagated``.

    All float32, whole tensors (no expanded views), rows of all but scale and offset contiguous.
    work, scale, offset, values: [N, K]; matrix: [K, K]; propagated: [N, width], width ≤ 128. offset
    None: the grid is e4m3 times scale, else ``levels`` steps of scale from offset. Not ``refine``:
    a column is rounded, its error over the diagonal of ``matrix`` passed on. ``refine``: ``work``
    holds what pulls at each column of the rounded ``values``; a column is rounded again to where
    pull over diagonal says, and its change is passed on.
    """
    rows, width = work.shape[0], propagated.shape[1]
    grid = (-(-rows // ROWS_PER_PROGRAM),)
    _gptq_columns_kernel[grid](
        work, matrix, scale, scale if offset is None else offset, values, propagated, rows,
        first_column,
        work.stride(0), matrix.stride(0), *scale.stride(), values.stride(0), propagated.stride(0),
        levels - 1.0,
        E4M3=offset is None, ANEW=refine, WIDTH=width, R=ROWS_PER_PROGRAM, B=128, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gptq_columns_kernel(
    work_ptr, matrix_ptr, scale_ptr, offset_ptr, values_ptr, passed_ptr, rows, first,
    work_row, matrix_row, scale_row, scale_column, values_row, passed_row, most,
    E4M3: tl.constexpr, ANEW: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    here = row < rows
    column = tl.arange(0, B)
    inside = column < WIDTH
    tile = tl.load(work_ptr + row[:, None] * work_row + first + column, here[:, None] & inside, 0.0)
    for j in range(WIDTH):
        at = first + j
        mine = tl.sum(tl.where(column == j, tile, 0.0), 1)
        line = matrix_ptr + tl.cast(at, tl.int64) * matrix_row
        diagonal = tl.load(line + at)
        scale = tl.load(scale_ptr + row * scale_row + at * scale_column, here, 1.0)
        value = values_ptr + row * values_row + at
        before = mine
        if ANEW:
            before = tl.load(value, here, 0.0)
            mine = before + tl.div_rn(mine, diagonal)
        if E4M3:
            near = (
                tl.clamp(tl.div_rn(mine, scale), -448.0, 448.0).to(tl.float8e4nv).to(tl.float32)
                * scale
            )
        else:
            offset = tl.load(offset_ptr + row * scale_row + at * scale_column, here, 0.0)
            code = tl.clamp(tl.div_rn(mine - offset, scale), 0.0, most)
            near = ((code + ROUND_TO_INT) - ROUND_TO_INT) * scale + offset
        left = before - near
        if not ANEW:
            left = tl.div_rn(left, diagonal)
        tl.store(value, near, here)
        tl.store(passed_ptr + row * passed_row + j, left, here)
        pulls = tl.load(line + first + column, inside, 0.0)
        tile += left[:, None] * pulls * (1.0 if ANEW else -1.0)
