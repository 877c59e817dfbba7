"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), and what improves on its result.

All of it minimises tr((W − Ŵ) H (W − Ŵ)ᵀ), the squared error of a layer's outputs on its
calibration inputs, with
H = 2 XᵀX. GPTQ rounds column after column and lets the columns not yet rounded carry the error;
``refine`` goes on
from any result: it fits scales and offsets to the codes under H, and then picks each code anew
given all the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from modelmill.quant.group_grid import (
    INT4_LEVELS,
    SYMMETRIC_ZERO_POINT,
    GroupGrid,
    round_grid_to_fp16,
)
from modelmill.quant.rounding_grid import BLOCK_COLUMNS, RoundingGrid

DAMPING = 0.01
_MIN_FIT_ROWS = 256  # whose grids are fitted at a time, at least
# as many as this leaves room for, in numbers of their normal equations
_FIT_ELEMENTS = {"cpu": 0, "cuda": 1 << 26}


def damped(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """H [K, K] with ``damping`` · mean diagonal on its diagonal; channels that were never seen get
    1 there.
    """
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    seen = diagonal > 0
    mean = float(diagonal[seen].mean()) if bool(seen.any()) else 1.0
    diagonal += damping * mean
    diagonal[~seen] += mean
    return hessian


def inverse_cholesky(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of H⁻¹, float32; more damping where H is not positive definite in
    float32.
    """
    damping = 0.0
    while True:
        try:
            lower = torch.linalg.cholesky(damped(hessian, damping) if damping else hessian)
            return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        except torch.linalg.LinAlgError:
            damping = max(10 * damping, 1e-3)


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    grid: GroupGrid,
    *,
    act_order: bool = True,
    num_levels: int = INT4_LEVELS,
) -> torch.Tensor:
    """Codes [N, K] (float32) on a grid found beforehand. weight: [N, K] float32; hessian: [K, K],
    damped.

    The grid stays as it is, so groups stay contiguous whatever the order.
    """
    steps = RoundingGrid(*grid.expand(weight.shape[1]), num_levels)
    return steps.quantize(round_with_compensation(weight, hessian, steps, act_order=act_order))


def round_with_compensation(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    rounding_grid: RoundingGrid,
    *,
    act_order: bool = True,
) -> torch.Tensor:
    """Rounded values [N, K], columns that are not rounded yet carrying the error of those that are.

    act_order: round the columns of the largest inputs first, while others can still carry their
    errors.
    """
    columns = weight.shape[1]
    here = torch.arange(columns, device=weight.device)
    order = torch.argsort(hessian.diagonal(), descending=True) if act_order else here
    work, rounding_grid = weight[:, order].clone(), rounding_grid.permute_columns(order)
    factor = inverse_cholesky(hessian[order][:, order]).contiguous()
    values = torch.empty_like(work)
    for first in range(0, columns, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, columns)
        errors = rounding_grid.round_columns(work, factor, first, last, values, refine=False)
        work[:, last:] -= errors @ factor[first:last, last:]
    out = torch.empty_like(values)
    out[:, order] = values
    return out


def refine(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    grid: GroupGrid,
    *,
    symmetric: bool,
    num_sweeps: int,
) -> tuple[torch.Tensor, GroupGrid]:
    """Fit the grid to the codes and choose the codes anew, ``num_sweeps`` times; no sweep makes the
    error larger.
    """
    for _ in range(num_sweeps):
        grid = fit_grid(weight, hessian, codes, grid, symmetric=symmetric)
        codes = refine_codes(weight, hessian, codes, grid)
    return codes, grid


def refine_codes(
    weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, grid: GroupGrid
) -> torch.Tensor:
    """Each column's codes chosen anew given all others; codes [N, K]."""
    steps = RoundingGrid(*grid.expand(weight.shape[1]), INT4_LEVELS)
    return steps.quantize(coordinate_descent_sweep(weight, hessian, grid.dequantize(codes), steps))


def coordinate_descent_sweep(
    weight: torch.Tensor, hessian: torch.Tensor, values: torch.Tensor, rounding_grid: RoundingGrid
) -> torch.Tensor:
    """Each column of ``values`` [N, K] rounded anew to what errs least under H given all others."""
    columns = weight.shape[1]
    values = values.clone()
    pull = (weight - values) @ hessian
    for first in range(0, columns, BLOCK_COLUMNS):
        last = min(first + BLOCK_COLUMNS, columns)
        changes = rounding_grid.round_columns(pull, hessian, first, last, values, refine=True)
        pull[:, last:] += changes @ hessian[first:last, last:]
    return values


def fit_grid(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: torch.Tensor,
    grid: GroupGrid,
    *,
    symmetric: bool,
) -> GroupGrid:
    """Scales and offsets that err least under H for these codes; a row whose error would not fall
    keeps its own.
    """
    columns, group, count = weight.shape[1], grid.group_size, grid.scale.shape[1]
    missing = count * group - columns
    h = F.pad(hessian, (0, missing, 0, missing))
    summed = h.view(count, group, -1).sum(1)  # [G, K]: what an offset of each group does
    scale, offset = grid.scale.clone(), grid.offset.clone()
    together = max(_MIN_FIT_ROWS, _FIT_ELEMENTS[weight.device.type] // (2 * count) ** 2)
    for first in range(0, len(weight), together):
        part = slice(first, first + together)
        w, q = (
            F.pad(weight[part], (0, missing)),
            F.pad(codes[part] - (SYMMETRIC_ZERO_POINT if symmetric else 0), (0, missing)),
        )
        normal, right = _normal_equations(w, q, h, summed, symmetric)
        ridge = normal.diagonal(dim1=1, dim2=2)
        ridge += 1e-6 * ridge.mean(-1, keepdim=True) + 1e-30
        found = torch.linalg.solve(normal, right).float()
        s, o = round_grid_to_fp16(found[:, :count], None if symmetric else found[:, count:])
        fresh, old = GroupGrid(s, o, group), GroupGrid(scale[part], offset[part], group)
        errors = (
            squared_output_error(weight[part], hessian, each.dequantize(codes[part]))
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
    """The normal equations of each row's scales, and of its offsets behind them: [n, m, m] and [n,
    m], float64.
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


def squared_output_error(
    weight: torch.Tensor, hessian: torch.Tensor, quantized: torch.Tensor
) -> torch.Tensor:
    """The squared error of each row's outputs, [N]."""
    off = weight - quantized
    return ((off @ hessian) * off).sum(-1)
