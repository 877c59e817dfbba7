"""Grids, GPTQ and what refines it: each does what it says, on small random layers with unlike
channels.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops.quant_types import quantize_per_row
from modelmill.quant.fp8 import gptq_to_e4m3
from modelmill.quant.gptq import (
    damp_hessian,
    gptq_codes,
    inverse_hessian_cholesky,
    refine_codes,
    refine_codes_and_grid,
    refit_grid_to_codes,
    squared_output_error_per_row,
)
from modelmill.quant.group_grid import (
    MIN_MAX_RANGE,
    QUICK_RANGE_SEARCH,
    find_group_grid,
    round_to_codes,
)


def layer(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the Hessian of correlated inputs, a few channels of which are large."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=draw)
    x = torch.randn(4 * columns, columns, generator=draw) @ torch.randn(
        columns, columns, generator=draw
    )
    x[:, :: max(1, columns // 5)] *= 10
    return weight, damp_hessian(x.T @ x / len(x))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 200),
    group=st.sampled_from([32, 64, 128]),
    symmetric=st.booleans(),
)
def test_a_grid_has_16_levels_that_float16_holds(
    rows: int, columns: int, group: int, symmetric: bool
) -> None:
    weight, hessian = layer(rows, columns, seed=columns)
    weight[0] = 0.25
    grid = find_group_grid(
        weight, group, symmetric=symmetric, importance=hessian.diagonal(), search=QUICK_RANGE_SEARCH
    )
    assert grid.scale.shape == (rows, -(-columns // group))
    for part in (grid.scale, grid.offset):
        assert torch.equal(part.half().float(), part)
    codes = grid.quantize(weight)
    assert bool(((codes >= 0) & (codes <= 15) & (codes == codes.round())).all())
    assert torch.equal(grid.quantize(grid.dequantize(codes)), codes), (
        "a value on the grid is its own nearest"
    )
    if symmetric:
        assert torch.equal(grid.offset, -8 * grid.scale)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_search_never_errs_more_than_the_exact_range(symmetric: bool) -> None:
    weight, hessian = layer(20, 200)
    mass = hessian.diagonal()
    errors = []
    for search in (MIN_MAX_RANGE, QUICK_RANGE_SEARCH):
        grid = find_group_grid(weight, 64, symmetric=symmetric, importance=mass, search=search)
        errors.append(((grid.dequantize(grid.quantize(weight)) - weight).square() * mass).sum(-1))
    assert bool((errors[1] <= errors[0] * (1 + 1e-5)).all())
    assert float(errors[1].sum()) < 0.9 * float(errors[0].sum())


def test_channels_that_are_never_seen_do_no_harm() -> None:
    weight, hessian = layer(8, 96)
    hessian[5], hessian[:, 5] = 0, 0
    damped_hessian = damp_hessian(hessian)
    assert float(damped_hessian[5, 5]) > 0
    codes = gptq_codes(
        weight, damped_hessian, find_group_grid(weight, 32, importance=hessian.diagonal())
    )
    assert bool(torch.isfinite(codes).all())
    blind = find_group_grid(weight, 32, importance=torch.zeros(96))
    assert bool(torch.isfinite(blind.scale).all())


def test_the_factor_is_the_inverses() -> None:
    _, hessian = layer(1, 150)
    factor = inverse_hessian_cholesky(hessian)
    assert float(factor.tril(-1).abs().max()) == 0
    torch.testing.assert_close(factor.T @ factor @ hessian, torch.eye(150), rtol=1e-2, atol=1e-2)


def test_a_singular_hessian_is_damped_until_it_has_a_factor() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(inverse_hessian_cholesky(x.T @ x)).all())


def test_gptq_is_the_textbooks_column_by_column() -> None:
    """Against a plain solution: after each column the others move to the best answer to its
    error.
    """
    weight, hessian = layer(5, 48, seed=3)
    grid = find_group_grid(weight, 32, importance=hessian.diagonal())
    scale, offset = grid.expand_to_columns(48)
    work, h = weight.double().clone(), hessian.double()
    expected = torch.empty(5, 48)
    for j in range(48):
        expected[:, j] = round_to_codes(work[:, j].float(), scale[:, j], offset[:, j])
        error = work[:, j] - (expected[:, j] * scale[:, j] + offset[:, j])
        rest = torch.arange(j + 1, 48)
        if len(rest):
            move = torch.linalg.solve(h[rest][:, rest], h[rest, j])
            work[:, rest] += error[:, None] * move
    actual = gptq_codes(weight, hessian, grid, act_order=False)
    assert float((actual != expected).float().mean()) < 0.02, "but for ties in float32"


@pytest.mark.parametrize("columns", [96, 128, 300])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_errs_less_than_nearest_and_refining_less_than_gptq(
    columns: int, act_order: bool
) -> None:
    weight, hessian = layer(24, columns, seed=columns)
    grid = find_group_grid(weight, 64, importance=hessian.diagonal())
    nearest = squared_output_error_per_row(
        weight, hessian, grid.dequantize(grid.quantize(weight))
    ).sum()
    codes = gptq_codes(weight, hessian, grid, act_order=act_order)
    rounded = squared_output_error_per_row(weight, hessian, grid.dequantize(codes)).sum()
    assert float(rounded) < 0.8 * float(nearest)
    better, fitted = refine_codes_and_grid(
        weight, hessian, codes, grid, symmetric=False, num_sweeps=2
    )
    assert float(
        squared_output_error_per_row(weight, hessian, fitted.dequantize(better)).sum()
    ) < 0.98 * float(rounded)


@pytest.mark.parametrize("symmetric", [False, True])
def test_each_step_of_refining_lowers_every_rows_error(symmetric: bool) -> None:
    weight, hessian = layer(24, 200, seed=1)
    grid = find_group_grid(weight, 64, symmetric=symmetric)
    codes = grid.quantize(weight)
    before = squared_output_error_per_row(weight, hessian, grid.dequantize(codes))
    grid = refit_grid_to_codes(weight, hessian, codes, grid, symmetric=symmetric)
    fitted = squared_output_error_per_row(weight, hessian, grid.dequantize(codes))
    assert bool((fitted <= before * (1 + 1e-4)).all())
    assert float(fitted.sum()) < 0.95 * float(before.sum())
    swept = squared_output_error_per_row(
        weight, hessian, grid.dequantize(refine_codes(weight, hessian, codes, grid))
    )
    assert bool((swept <= fitted * (1 + 1e-4)).all())
    assert float(swept.sum()) < 0.7 * float(fitted.sum())
    if symmetric:
        assert torch.equal(grid.offset, -8 * grid.scale)


@pytest.mark.parametrize("per_channel", [True, False])
def test_fp8_weights_that_carry_errors_err_less_on_the_outputs(per_channel: bool) -> None:
    weight, hessian = layer(24, 200)
    weight[3] = 0
    dtype = torch.float8_e4m3fn
    plain, scale = quantize_per_row(weight if per_channel else weight.flatten(), dtype)
    scale = scale.expand(24).clone()
    values, new_scale = gptq_to_e4m3(weight, hessian, scale, per_channel=per_channel)
    assert values.dtype is dtype
    assert bool(((new_scale >= scale) & (new_scale < 2 * scale)).all()), (
        "of the binade above the least"
    )
    assert (len(set(new_scale.tolist())) > 1) == per_channel
    assert not values[3].float().any()
    with_feedback, nearest = (
        v.view_as(weight).float() * s[:, None] for v, s in ((values, new_scale), (plain, scale))
    )
    errors = [
        float(squared_output_error_per_row(weight, hessian, each).sum())
        for each in (with_feedback, nearest)
    ]
    assert errors[0] < 0.6 * errors[1]
    assert float((with_feedback - weight).abs().max()) < 0.2 * float(weight.abs().max())
