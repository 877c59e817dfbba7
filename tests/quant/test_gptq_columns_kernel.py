"""The walk through a block of columns as a kernel is the walk in torch operations."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from modelmill.quant.gptq import (
    RoundingGrid,
    coordinate_descent_sweep,
    round_with_error_compensation,
    squared_output_error_per_row,
)
from modelmill.quant.group_grid import find_group_grid
from tests.quant.test_gptq import layer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def kernel(device: str) -> Any:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton: pip install -e '.[gpu]'")
    from modelmill.ops.triton.norm_quantize import gptq_columns

    reason = gptq_columns.unavailable_reason(device)
    if reason is not None:
        pytest.skip(reason)
    return gptq_columns


def steps_of(weight: torch.Tensor, hessian: torch.Tensor, grid_type: str) -> RoundingGrid:
    if grid_type == "e4m3":
        return RoundingGrid(
            (weight.abs().amax(1, keepdim=True) / 448).expand_as(weight).contiguous()
        )
    grid = find_group_grid(
        weight, 32, importance=hessian.diagonal(), symmetric=grid_type == "symmetric"
    )
    return RoundingGrid(*grid.expand_to_columns(weight.shape[1]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grid_type", ["grid", "symmetric", "e4m3"])
@pytest.mark.parametrize(("rows", "columns"), [(5, 40), (9, 131)])
def test_the_kernel_walks_as_torch_does(
    device: str, grid_type: str, rows: int, columns: int, monkeypatch: Any
) -> None:
    walks = kernel(device)
    if grid_type == "e4m3" and device == "cpu":
        pytest.skip(
            "Triton's interpreter loses the carry where rounding to e4m3 reaches the next binade"
        )
    weight, hessian = (t.to(device) for t in layer(rows, columns, seed=columns))
    steps = steps_of(weight, hessian, grid_type)
    results = []
    for used in (None, walks):
        monkeypatch.setattr(
            "modelmill.quant.gptq._load_gptq_columns_kernel", lambda _, used=used: used
        )
        first = round_with_error_compensation(weight, hessian, steps)
        results.append((first, coordinate_descent_sweep(weight, hessian, first, steps)))
    for expected, actual in zip(*results, strict=True):
        same = (expected - actual).abs() <= 1e-5 * expected.abs()
        assert float(same.float().mean()) > 0.97, "but for values between two steps"
        errors = [
            float(squared_output_error_per_row(weight, hessian, each).sum())
            for each in (expected, actual)
        ]
        assert errors[1] == pytest.approx(errors[0], rel=0.03)


@pytest.mark.gpu
def test_a_matrix_of_a_large_model_is_rounded_on_the_gpu_as_on_the_cpu() -> None:
    weight, hessian = layer(300, 1000)
    expected, on_gpu = (
        round_with_error_compensation(
            weight.to(device), hessian.to(device), steps_of(weight, hessian, "grid").to(device)
        ).cpu()
        for device in ("cpu", "cuda")
    )
    errors = [
        float(squared_output_error_per_row(weight, hessian, each).sum())
        for each in (expected, on_gpu)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)
