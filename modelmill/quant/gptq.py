"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) and the refinement of its result.

Both minimise tr((W − Ŵ) H (W − Ŵ)ᵀ), the squared error of a layer's outputs on its calibration
inputs, with H = 2 XᵀX. GPTQ rounds column after column and compensates the error in the columns not
yet rounded; ``refine_codes_and_grid`` starts from any result: it fits scales and offsets to the
codes under H, and then chooses each code again given all the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from modelmill.ops.quant_types import round_to_dtype
from modelmill.quant.group_grid import (
    INT4_LEVELS,
    SYMMETRIC_ZERO_POINT,
    GroupGrid,
    round_grid_to_fp16,
    round_to_codes,
)

BLOCK_COLUMNS = 128
E4M3_DTYPE = torch.float8_e4m3fn
DAMPING = 0.01
_MIN_FIT_CHUNK_ROWS = 256  # rows whose grids are fitted at a time, at least
# limit of the rows fitted at a time, in elements of their normal equations
_MAX_FIT_ELEMENTS_BY_DEVICE = {"cpu": 0, "cuda": 1 << 26}


@dataclass(frozen=True)
class RoundingGrid:
    """What each weight may be rounded to, and the rounding of columns to it.

    Attributes:
        scale: [N, K] float32.
        offset: [N, K] float32; None: e4m3 times scale.
        num_levels: levels of the grid.
    """

    scale: torch.Tensor
    offset: torch.Tensor | None = None
    num_levels: int = INT4_LEVELS

    def permute_columns(self, perm: torch.Tensor) -> RoundingGrid:
        """Return the grid with its columns permuted [K]."""
        offset = None if self.offset is None else self.offset[:, perm]
        return replace(self, scale=self.scale[:, perm], offset=offset)

    def to(self, device: str) -> RoundingGrid:
        """Return a copy on the device."""
        return replace(
            self,
            scale=self.scale.to(device),
            offset=None if self.offset is None else self.offset.to(device),
        )

    def round_column(self, column: torch.Tensor, j: int) -> torch.Tensor:
        """Round [N] values at column j."""
        scale = self.scale[:, j]
        if self.offset is None:
            return round_to_dtype(column / scale, E4M3_DTYPE).float() * scale
        return (
            round_to_codes(column, scale, self.offset[:, j], self.num_levels) * scale
            + self.offset[:, j]
        )

    def quantize(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of values [N, K] that are on the grid."""
        assert self.offset is not None, "a grid of levels"
        return round_to_codes(values, self.scale, self.offset, self.num_levels)

    def round_block_with_propagation(
        self,
        work: torch.Tensor,
        matrix: torch.Tensor,
        first: int,
        last: int,
        values: torch.Tensor,
        *,
        refine: bool,
    ) -> torch.Tensor:
        """Round columns first … last of ``work`` [N, K] into ``values``.

        Without refine, ``work`` are weights, matrix [K, K] is the factor of H⁻¹, and the error of a
        column is compensated in later ones. With refine, ``work`` is the gradient at each column of
        ``values``, matrix is H, and the change of a column is propagated. Here both happen inside
        the block; the caller updates the columns behind it.

        Returns:
            What each column propagates, [N, width].
        """
        propagated = torch.empty(len(work), last - first, device=work.device)
        kernel = _load_gptq_columns_kernel(work.device.type)
        if kernel is not None and (self.offset is not None or kernel.supports_fp8(work.device)):
            kernel.run(
                work,
                matrix,
                first,
                self.scale,
                self.offset,
                self.num_levels,
                values,
                propagated,
                refine,
            )
            return propagated
        block, inner = work[:, first:last], matrix[first:last, first:last]
        for j in range(last - first):
            column, diagonal = block[:, j], inner[j, j]
            before = values[:, first + j].clone() if refine else column
            values[:, first + j] = self.round_column(
                before + column / diagonal if refine else column, first + j
            )
            propagated[:, j] = before - values[:, first + j]
            if refine:
                block += propagated[:, j, None] * inner[j]
            else:
                propagated[:, j] /= diagonal
                block[:, j:] -= propagated[:, j, None] * inner[j, j:]
        return propagated


def damp_hessian(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """Return H [K, K] with ``damping`` · mean diagonal added to its diagonal.

    Channels that are always 0 get 1 there.
    """
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    active = diagonal > 0
    mean = float(diagonal[active].mean()) if bool(active.any()) else 1.0
    diagonal += damping * mean
    diagonal[~active] += mean
    return hessian


def inverse_hessian_cholesky(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of H⁻¹, float32.

    Damping is added until H is positive definite in float32.
    """
    damping = 0.0
    while True:
        try:
            lower = torch.linalg.cholesky(damp_hessian(hessian, damping) if damping else hessian)
            factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return factor
        except torch.linalg.LinAlgError:
            damping = max(10 * damping, 1e-3)


def gptq_codes(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: GroupGrid,
    *,
    act_order: bool = True,
    num_levels: int = INT4_LEVELS,
) -> torch.Tensor:
    """Return the codes [N, K] (float32) on a given grid.

    The grid does not change, so groups stay contiguous in any order.

    Args:
        weight: [N, K] float32.
        hessian: [K, K], damped.
        grid: the grid of the weight.
        act_order: see ``round_with_error_compensation``.
        num_levels: levels of the grid.
    """
    steps = RoundingGrid(*grid.expand_to_columns(weight.shape[1]), num_levels)
    return steps.quantize(
        round_with_error_compensation(weight, hessian, steps, act_order=act_order)
    )


def round_with_error_compensation(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    rounding_grid: RoundingGrid,
    *,
    act_order: bool = True,
) -> torch.Tensor:
    """Round column by column; columns not yet rounded compensate the error of the rounded ones.

    act_order: round the columns of the largest inputs first, while others can still compensate
    their errors.

    Returns:
        Rounded values [N, K].
    """
    columns = weight.shape[1]
    here = torch.arange(columns, device=weight.device)
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else here
    work, rounding_grid = weight[:, order].clone(), rounding_grid.permute_columns(order)
    factor = inverse_hessian_cholesky(hessian[order][:, order]).contiguous()
    values = torch.empty_like(work)
    for first in range(0, columns, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, columns)
        errors = rounding_grid.round_block_with_propagation(
            work, factor, first, last, values, refine=False
        )
        work[:, last:] -= errors @ factor[first:last, last:]
    out = torch.empty_like(values)
    out[:, order] = values
    return out


def refine_codes_and_grid(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    grid: GroupGrid,
    *,
    symmetric: bool,
    num_sweeps: int,
) -> tuple[torch.Tensor, GroupGrid]:
    """Fit the grid to the codes and choose the codes again, ``num_sweeps`` times.

    No sweep makes the error larger.
    """
    for _ in range(num_sweeps):
        grid = refit_grid_to_codes(weight, hessian, codes, grid, symmetric=symmetric)
        codes = refine_codes(weight, hessian, codes, grid)
    return codes, grid


def refine_codes(
    weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, grid: GroupGrid
) -> torch.Tensor:
    """Choose each column's codes again given all others; return codes [N, K]."""
    steps = RoundingGrid(*grid.expand_to_columns(weight.shape[1]), INT4_LEVELS)
    return steps.quantize(coordinate_descent_sweep(weight, hessian, grid.dequantize(codes), steps))


def coordinate_descent_sweep(
    weight: torch.Tensor, hessian: torch.Tensor, values: torch.Tensor, rounding_grid: RoundingGrid
) -> torch.Tensor:
    """Round each column of ``values`` [N, K] again to the smallest error under H."""
    columns = weight.shape[1]
    values = values.clone()
    pull = (weight - values) @ hessian
    for first in range(0, columns, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, columns)
        changes = rounding_grid.round_block_with_propagation(
            pull, hessian, first, last, values, refine=True
        )
        pull[:, last:] += changes @ hessian[first:last, last:]
    return values


def refit_grid_to_codes(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    grid: GroupGrid,
    *,
    symmetric: bool,
) -> GroupGrid:
    """Fit the scales and offsets that minimise the error under H for these codes.

    A row whose error would not decrease keeps its scales and offsets.
    """
    columns = weight.shape[1]
    group = grid.group_size
    count = grid.scale.shape[1]
    missing = count * group - columns
    h = F.pad(hessian, (0, missing, 0, missing))
    summed = h.view(count, group, -1).sum(1)  # [G, K]: effect of each group's offset
    scale, offset = grid.scale.clone(), grid.offset.clone()
    together = max(
        _MIN_FIT_CHUNK_ROWS, _MAX_FIT_ELEMENTS_BY_DEVICE[weight.device.type] // (2 * count) ** 2
    )
    for first in range(0, len(weight), together):
        part = slice(first, first + together)
        w, q = (
            F.pad(weight[part], (0, missing)),
            F.pad(codes[part] - (SYMMETRIC_ZERO_POINT if symmetric else 0), (0, missing)),
        )
        normal, right = _normal_equations(w, q, h, summed, symmetric)
        ridge = normal.diagonal(dim1=1, dim2=2)
        ridge += 1e-6 * ridge.mean(-1, keepdim=True) + 1e-30
        solution = torch.linalg.solve(normal, right).float()
        s, o = round_grid_to_fp16(solution[:, :count], None if symmetric else solution[:, count:])
        fresh, old = GroupGrid(s, o, group), GroupGrid(scale[part], offset[part], group)
        errors = (
            squared_output_error_per_row(weight[part], hessian, each.dequantize(codes[part]))
            for each in (fresh, old)
        )
        better = (next(errors) < next(errors))[:, None]
        scale[part], offset[part] = (
            torch.where(better, s, scale[part]),
            torch.where(better, o, offset[part]),
        )
    return GroupGrid(scale, offset, group)


def _normal_equations(
    w: torch.Tensor,
    q: torch.Tensor,
    h: torch.Tensor,
    hessian_group_sums: torch.Tensor,
    symmetric: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normal equations of each row's scales, then its offsets, float64.

    Shapes: [n, m, m] and [n, m].
    """
    count = len(hessian_group_sums)
    group = len(h) // count
    rows, right_q = [], []
    for g in range(count):
        pulled = q[:, g * group : (g + 1) * group] @ h[g * group : (g + 1) * group]  # [n, K]
        rows.append((pulled * q).view(len(q), count, group).sum(-1))
        right_q.append((pulled * w).sum(-1))
    normal, right = torch.stack(rows, 1).double(), torch.stack(right_q, 1).double()
    if symmetric:
        return normal, right
    grouped = q.view(len(q), count, group)
    mixed = torch.einsum(
        "nak,bak->nab", grouped, hessian_group_sums.view(count, count, group)
    ).double()
    plain = hessian_group_sums.view(count, count, group).sum(-1).double().expand(len(q), -1, -1)
    top, bottom = torch.cat([normal, mixed], 2), torch.cat([mixed.transpose(1, 2), plain], 2)
    return torch.cat([top, bottom], 1), torch.cat([right, (w @ hessian_group_sums.T).double()], 1)


def squared_output_error_per_row(
    weight: torch.Tensor, hessian: torch.Tensor, quantized: torch.Tensor
) -> torch.Tensor:
    """Return the squared error of each row's outputs, [N]."""
    off = weight - quantized
    return ((off @ hessian) * off).sum(-1)


def _load_gptq_columns_kernel(device_type: str) -> Any:
    """Return the module of the GPU kernel, or None without one."""
    if device_type != "cuda":
        return None
    try:
        from modelmill.ops.triton.norm_quantize import gptq_columns
    except ImportError:
        return None
    return gptq_columns if gptq_columns.unavailable_reason(device_type) is None else None
