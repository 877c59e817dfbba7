"""Norms with 8-bit outputs: the kernels round what the reference rounds, to the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import shelf
from modelmill.ops.add_rms_norm_quant import add_rms_norm_quant
from modelmill.ops.rms_norm_quant import forms, limits, rms_norm_quant

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _variants(op: str, device: str) -> list[Any]:
    offered = [m for m in shelf.variants(op).values() if m.available(device) is None]
    found = [shelf._guarded(m, m.run, shelf.reference(op)) for m in offered]
    if not found:
        pytest.skip("no variant runs here")
    return found


def _rows(rows: int, width: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Normal rows; among them one of zeros, one with an outlier of 1e4, one that is tiny."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x[0] = 0.0
    x[-1, width // 2] = 1e4
    if rows > 2:
        x[1] *= 1e-5
    return x.to(device, dtype)


def _agree(label: str, mine: tuple[Any, ...], truth: tuple[Any, ...], dtype: torch.dtype, kind: torch.dtype) -> None:
    """Equal but for values that lie on a border, where the sums' order of operations decides."""
    got, expected = (t[0].view(torch.int8) for t in (mine, truth))
    assert got.shape == expected.shape, label
    apart = got != expected
    assert float(apart.float().mean()) <= (0.002 if dtype is torch.float32 else 0.02), f"{label}: {apart.sum()} apart"
    gap = (mine[0].float() - truth[0].float())[apart].abs()
    assert not len(gap) or float(gap.max()) <= (2.0 if kind is torch.int8 else 32.0), label
    assert (mine[1] is None) is (truth[1] is None), label
    if truth[1] is not None:
        assert torch.allclose(mine[1], truth[1], rtol=1e-5 if dtype is torch.float32 else 1e-2), label
    for more, right in zip(mine[2:], truth[2:], strict=True):
        assert torch.equal(more, right), label


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=12, derandomize=True)
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_every_form_agrees_with_the_reference(
    device: str, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    runs, adds = _variants("rms_norm_quant", device), _variants("add_rms_norm_quant", device)
    x, residual = _rows(rows, width, dtype, device, seed), _rows(rows, width, dtype, device, seed + 1) * 3
    weight = torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh tensors are full of NaN, or of 127
    try:
        for name, form in forms(width, device, seed):
            truth = rms_norm_quant(x, weight, 1e-5, **form)
            for run in runs:
                _agree(name, run(x, weight, 1e-5, **form), truth, dtype, form["kind"])
            truth = add_rms_norm_quant(x, residual, weight, 1e-5, **form)
            for run in adds:
                _agree(name, run(x, residual.clone(), weight, 1e-5, **form), truth, dtype, form["kind"])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
def test_halves_go_to_the_even_number_everywhere(device: str) -> None:
    """Rows of ±1 have a mean square of 1: y is the weight, and with a factor of 1 the weight decides the border."""
    halves = torch.arange(-140, 140) + 0.5
    x = torch.where(torch.arange(len(halves)) % 3 == 0, -1.0, 1.0)[None].to(device)
    weight, one = halves.to(device), torch.ones(1, device=device)
    expected = (halves * x[0].cpu()).round().clamp(-127, 127)
    for run in [rms_norm_quant, *_variants("rms_norm_quant", device)]:
        values, _ = run(x, weight, 0.0, torch.int8, one)
        assert torch.equal(values[0].cpu().float(), expected)
        zero = torch.full((len(halves),), 3, dtype=torch.int32, device=device)
        values, _ = run(x, weight, 0.0, torch.int8, one.expand(len(halves)).contiguous(), zero)
        assert torch.equal(values[0].cpu().float(), ((halves * x[0].cpu()).round() + 3).clamp(-128, 127))


@pytest.mark.parametrize("device", DEVICES)
def test_order_moves_columns_with_their_own_factors(device: str) -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.ones(50, device=device)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).int().to(device)
    factor = torch.linspace(1, 40, 50, device=device)
    for run in [rms_norm_quant, *_variants("rms_norm_quant", device)]:
        plain, _ = run(x, weight, 1e-5, torch.int8, factor[order.argsort()].contiguous())
        moved, _ = run(x, weight, 1e-5, torch.int8, factor, None, order)
        assert torch.equal(moved, plain[:, order.long()])


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_the_scale_undoes_the_factor(kind: torch.dtype) -> None:
    x = _rows(5, 64, torch.float32, "cpu", 0)
    values, scale = rms_norm_quant(x, torch.ones(64), 1e-5, kind)
    assert scale is not None
    back, y = values.float() * scale[:, None], x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    step = scale[:, None] * 0.5 if kind is torch.int8 else (y.abs() / 16).clamp(min=scale[:, None] * 2.0**-10)
    assert bool(((back - y).abs() <= step * 1.001).all())
    assert scale[0] == pytest.approx(1e-6 / limits(kind, 8, shifted=False)[1])  # the row of zeros
