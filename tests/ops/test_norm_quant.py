"""Norms with 8-bit outputs: kernels give the values of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.add_rms_norm_quant import add_rms_norm_quant
from modelmill.ops.bound_op import OpImplementation, SelectedOp
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.quantize import quantize
from modelmill.ops.rms_norm_quant import named_quant_mode_args, quant_min_max, rms_norm_quant

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _variants(op: str, device: str) -> list[Any]:
    offered = [
        m for m in registry.implementations(op).values() if m.unavailable_reason(device) is None
    ]
    declared, fallback = registry.op_declarations()[op], registry.reference(op)
    runs = [
        SelectedOp(op, declared, [OpImplementation.from_backend_module(m, m.run)], fallback)
        for m in offered
    ]
    if not runs:
        pytest.skip("no variant runs here")
    return runs


def _rows(rows: int, width: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Normal rows; among them one of zeros, one with an outlier of 1e4, one that is tiny."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x[0] = 0.0
    x[-1, width // 2] = 1e4
    if rows > 2:
        x[1] *= 1e-5
    return x.to(device, dtype)


def _agree(
    label: str,
    actual: tuple[Any, ...],
    reference: tuple[Any, ...],
    dtype: torch.dtype,
    quant_dtype: torch.dtype,
) -> None:
    """Equal but for values that lie on a border, where the sums' order of operations decides."""
    actual_bytes, reference_bytes = (t[0].view(torch.int8) for t in (actual, reference))
    assert actual_bytes.shape == reference_bytes.shape, label
    apart = actual_bytes != reference_bytes
    assert float(apart.float().mean()) <= (0.002 if dtype is torch.float32 else 0.02), (
        f"{label}: {apart.sum()} apart"
    )
    gap = (actual[0].float() - reference[0].float())[apart].abs()
    assert not len(gap) or float(gap.max()) <= (2.0 if quant_dtype is torch.int8 else 32.0), label
    assert (actual[1] is None) is (reference[1] is None), label
    if reference[1] is not None:
        assert torch.allclose(
            actual[1], reference[1], rtol=1e-5 if dtype is torch.float32 else 1e-2
        ), label
    for more, expected in zip(actual[2:], reference[2:], strict=True):
        assert torch.equal(more, expected), label


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
@settings(deadline=None, max_examples=12, derandomize=True)
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 99))
def test_every_form_agrees_with_the_reference(
    device: str, dtype: torch.dtype, rows: int, width: int, seed: int
) -> None:
    runs, adds = _variants("rms_norm_quant", device), _variants("add_rms_norm_quant", device)
    x, residual = (
        _rows(rows, width, dtype, device, seed),
        _rows(rows, width, dtype, device, seed + 1) * 3,
    )
    weight = torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    # fresh tensors are full of NaN, or of 127
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for name, mode in named_quant_mode_args(width, device, seed):
            spec = ActQuantSpec(**mode)
            expected = rms_norm_quant(x, weight, 1e-5, spec)
            for run in runs:
                _agree(name, run(x, weight, 1e-5, spec), expected, dtype, mode["dtype"])
            expected = add_rms_norm_quant(x, residual, weight, 1e-5, spec)
            for run in adds:
                _agree(
                    name,
                    run(x, residual.clone(), weight, 1e-5, spec),
                    expected,
                    dtype,
                    mode["dtype"],
                )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_the_references_however_small(device: str) -> None:
    """test_implementations counts errors below one as absolute, and most scales are below."""
    x, spec = _rows(5, 64, torch.float32, device, 0), ActQuantSpec(torch.int8)
    for run in _variants("quantize", device):
        _agree("quantize", run(x, spec), quantize(x, spec), torch.float32, torch.int8)


@pytest.mark.parametrize("device", DEVICES)
def test_halves_go_to_the_even_number_everywhere(device: str) -> None:
    """Rows of ±1 have a mean square of 1: y is the weight, and with a factor of 1 the weight
    decides the border.
    """
    halves = torch.arange(-140, 140) + 0.5
    x = torch.where(torch.arange(len(halves)) % 3 == 0, -1.0, 1.0)[None].to(device)
    weight, one = halves.to(device), torch.ones(1, device=device)
    expected = (halves * x[0].cpu()).round().clamp(-127, 127)
    for run in [rms_norm_quant, *_variants("rms_norm_quant", device)]:
        values, _ = run(x, weight, 0.0, ActQuantSpec(torch.int8, one))
        assert torch.equal(values[0].cpu().float(), expected)
        zero = torch.full((len(halves),), 3, dtype=torch.int32, device=device)
        factors = one.expand(len(halves)).contiguous()
        values, _ = run(x, weight, 0.0, ActQuantSpec(torch.int8, factors, zero))
        assert torch.equal(
            values[0].cpu().float(), ((halves * x[0].cpu()).round() + 3).clamp(-128, 127)
        )


@pytest.mark.parametrize("device", DEVICES)
def test_order_moves_columns_with_their_own_factors(device: str) -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.ones(50, device=device)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).int().to(device)
    factor = torch.linspace(1, 40, 50, device=device)
    for run in [rms_norm_quant, *_variants("rms_norm_quant", device)]:
        unmoved = factor[order.argsort()].contiguous()
        plain, _ = run(x, weight, 1e-5, ActQuantSpec(torch.int8, unmoved))
        moved, _ = run(x, weight, 1e-5, ActQuantSpec(torch.int8, factor, None, order))
        assert torch.equal(moved, plain[:, order.long()])


@pytest.mark.parametrize("quant_dtype", [torch.int8, torch.float8_e4m3fn])
def test_the_scale_undoes_the_factor(quant_dtype: torch.dtype) -> None:
    x = _rows(5, 64, torch.float32, "cpu", 0)
    values, scale = rms_norm_quant(x, torch.ones(64), 1e-5, ActQuantSpec(quant_dtype))
    assert scale is not None
    back, y = (
        values.float() * scale[:, None],
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    )
    step = (
        scale[:, None] * 0.5
        if quant_dtype is torch.int8
        else (y.abs() / 16).clamp(min=scale[:, None] * 2.0**-10)
    )
    assert bool(((back - y).abs() <= step * 1.001).all())
    # the row of zeros
    assert scale[0] == pytest.approx(1e-6 / quant_min_max(quant_dtype, 8, has_zero_point=False)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 4096, 4352), (1, 64, 64), (7, 8192, 8192), (130, 1040, 512)])
def test_a_few_rows_in_another_order_as_many_of_them(sizes: tuple[int, int, int]) -> None:
    """The kernel for one row at a time beside that for groups of rows; sums of squares are added in
    other orders.
    """
    from modelmill.ops.cuda.norm_quantize import rmsnorm_quant_permute

    rows, width, columns = sizes
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    x, residual = (
        torch.randn(rows, width, generator=generator, device="cuda").bfloat16() for _ in range(2)
    )
    weight = torch.randn(width, generator=generator, device="cuda").bfloat16()
    order = torch.randint(
        -1, width, (columns,), generator=generator, device="cuda", dtype=torch.int32
    )
    factor = torch.rand(columns, generator=generator, device="cuda") * 40
    zero = torch.randint(-9, 9, (columns,), generator=generator, device="cuda", dtype=torch.int32)
    for quant_dtype, per_column in [
        (torch.int8, (factor, zero, order)),
        (torch.int8, (factor[:1].clone(), None, order)),
        (torch.float8_e4m3fn, (None, None, order)),
        (torch.int8, (None, None, order)),
    ]:
        for residual_or_none in (None, residual):
            spec = ActQuantSpec(quant_dtype, *per_column)
            assert registry.backend_serves_args("rms_norm_quant", "cuda", x, weight, 1e-5, spec)
            together = (4 if per_column[1] is None else 2) * (1 if residual_or_none is None else 2)
            config = rmsnorm_quant_permute.config_for(width, columns, together, threads_per_sm=512)
            sums = [
                None if residual_or_none is None else residual_or_none.clone() for _ in range(2)
            ]
            few = rmsnorm_quant_permute.rms_norm_quant(x, sums[0], weight, 1e-5, spec)
            many = rmsnorm_quant_permute.rms_norm_quant(x, sums[1], weight, 1e-5, spec, config)
            apart = (few[0].view(torch.int8).int() - many[0].view(torch.int8).int()).abs()
            assert int(apart.max()) <= 1
            assert float(apart.float().mean()) < 2e-3
            assert few[1] is None or torch.allclose(few[1], many[1], rtol=5e-3)  # type: ignore[arg-type]
            assert residual_or_none is None or torch.equal(sums[0], sums[1])  # type: ignore[arg-type]
