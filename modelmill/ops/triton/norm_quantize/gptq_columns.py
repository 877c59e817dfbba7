"""Inner loop of GPTQ: rounds columns one after another and propagates each column's error.

Computes: values[N, K] of a block of columns: rounds column after column of work[N, K] and
    propagates each error by matrix[K, K]
Dtypes: float32
Layout: row-major
Range: any N; up to 128 columns of a block
Technique: eight rows per program in registers, one launch per block of columns
Used by: gptq.py

Written as torch operations this is a dozen launches per column. Rows are independent: a program
holds some rows of a block of columns in registers and loops over the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.common.device import supports_fp8 as supports_fp8
from modelmill.ops.triton.common.device import unavailable_reason_for_portable_kernel

unavailable_reason = unavailable_reason_for_portable_kernel

ROWS_PER_PROGRAM = 8
ROUNDING_MAGIC_NUMBER = tl.constexpr(1.5 * 2**23)  # float32 of this size have no fraction


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
    """Round a block of columns of ``work`` into ``values``; propagated errors go to ``propagated``.

    All tensors are float32 and whole (no expanded views); rows of all but scale and offset are
    contiguous.

    Args:
        work: [N, K], the values to round; with ``refine`` the gradient at each column of
            ``values``.
        matrix: [K, K].
        first_column: first column of the block.
        scale: [N, K].
        offset: [N, K]; the grid is ``levels`` steps of scale from offset. None: the grid is e4m3 ·
            scale.
        levels: number of grid points.
        values: [N, K], the rounded values.
        propagated: [N, width], width ≤ 128 columns of the block.
        refine: False: round a column and propagate its error divided by the diagonal of ``matrix``.
            True: round it again at its value + work / diagonal, and propagate its change.
    """
    rows, width = work.shape[0], propagated.shape[1]
    grid = (-(-rows // ROWS_PER_PROGRAM),)
    _gptq_columns_kernel[grid](
        work, matrix, scale, scale if offset is None else offset, values, propagated, rows,
        first_column,
        work.stride(0), matrix.stride(0), *scale.stride(), values.stride(0), propagated.stride(0),
        levels - 1.0,
        E4M3=offset is None, REFINE=refine, WIDTH=width, R=ROWS_PER_PROGRAM, B=128, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gptq_columns_kernel(
    work_ptr, matrix_ptr, scale_ptr, offset_ptr, values_ptr, propagated_ptr, rows, first,
    work_row, matrix_row, scale_row, scale_column, values_row, propagated_row, max_code,
    E4M3: tl.constexpr, REFINE: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    row_valid = row < rows
    column = tl.arange(0, B)
    inside = column < WIDTH
    tile = tl.load(
        work_ptr + row[:, None] * work_row + first + column, row_valid[:, None] & inside, 0.0
    )
    for j in range(WIDTH):
        at = first + j
        target = tl.sum(tl.where(column == j, tile, 0.0), 1)
        line = matrix_ptr + tl.cast(at, tl.int64) * matrix_row
        diagonal = tl.load(line + at)
        scale = tl.load(scale_ptr + row * scale_row + at * scale_column, row_valid, 1.0)
        value = values_ptr + row * values_row + at
        before = target
        if REFINE:
            before = tl.load(value, row_valid, 0.0)
            target = before + tl.div_rn(target, diagonal)
        if E4M3:
            rounded = (
                tl.clamp(tl.div_rn(target, scale), -448.0, 448.0).to(tl.float8e4nv).to(tl.float32)
                * scale
            )
        else:
            offset = tl.load(offset_ptr + row * scale_row + at * scale_column, row_valid, 0.0)
            code = tl.clamp(tl.div_rn(target - offset, scale), 0.0, max_code)
            rounded = ((code + ROUNDING_MAGIC_NUMBER) - ROUNDING_MAGIC_NUMBER) * scale + offset
        error = before - rounded
        if not REFINE:
            error = tl.div_rn(error, diagonal)
        tl.store(value, rounded, row_valid)
        tl.store(propagated_ptr + row * propagated_row + j, error, row_valid)
        matrix_row_values = tl.load(line + first + column, inside, 0.0)
        tile += error[:, None] * matrix_row_values * (1.0 if REFINE else -1.0)
