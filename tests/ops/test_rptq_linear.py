"""RPTQ kernels against the fake-quantized product in float64, channel by channel."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from modelmill.core.config import BuildConfig
from modelmill.ops import registry, rptq_linear, rptq_quant
from modelmill.ops.int4_linear import pack_codes
from modelmill.quant.recipe import InputStatistics
from modelmill.quant.rptq import RptqRecipe
from modelmill.weights.rptq import RptqWeight

ROWS = (1, 7, 64, 1000)
# K: a multiple of nothing, of 32, one channel, more than a group of 64
SHAPES = ((100, 24), (96, 40), (1, 5), (2100, 9))
BITS_AND_MODES = [
    (bits, mode) for bits in ("w8a8", "w4a8", "w4a4") for mode in ("exact", "folded", "dynamic")
]


def _inputs(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Normal values, one channel × 30, one × −3, one skewed, one that is always 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    if columns > 4:
        x[:, 3] *= 30
        x[:, columns - 1] *= -3
        x[:, 1] = x[:, 1].abs() * 3
        x[:, 2] = 0
    return x


def _statistics(x: torch.Tensor) -> InputStatistics:
    size = x.abs()
    ends = x.amin(0), x.amax(0)
    return InputStatistics(len(x), x.T @ x / len(x), size.mean(0), size.amax(0), *ends, x[:64])


@functools.cache
def _weight(bits: str, mode: str, columns: int, n: int) -> RptqWeight:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(n, columns, generator=generator) * columns**-0.5
    rptq = RptqRecipe(BuildConfig(quantization="rptq", bits=bits, mode=mode)).quantize(
        weight, _statistics(_inputs(256, columns, 1))
    )
    assert isinstance(rptq, RptqWeight)
    return rptq


def _plain(
    weight: RptqWeight, q: torch.Tensor, step: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(product, sum of magnitudes) [T, N] float64: Σ s (q − z) · t (w − y) over real channels."""
    steps = weight.input_scales if step is None else step
    assert steps is not None
    assert not bool(q[:, weight.perm < 0].any())
    s = steps.double().repeat_interleave(weight.group_size, -1)
    t = weight.scale.double().repeat_interleave(weight.group_size, 1)
    w = t * weight.codes().double()
    magnitude = w.abs() if weight.offset is None else w.clamp(min=8 * t)  # or sums of code - 8
    size = (s * q.double()).abs() @ magnitude.T
    if weight.offset is not None:
        w = w + weight.offset.double().repeat_interleave(weight.group_size, 1)
    real = (weight.perm >= 0).double()
    z = (
        torch.zeros(q.shape[1], dtype=torch.float64)
        if weight.input_zero_points is None
        else weight.input_zero_points.double()
    )
    return (s * real * (q.double() - z)) @ w.T, size + (s * real * z).abs().expand(
        len(q), -1
    ) @ w.abs().T


def _kernels() -> list[tuple[str, ModuleType]]:
    return [("torch", rptq_linear), *registry.implementations("rptq_linear").items()]


def _check(module: ModuleType, name: str, weight: RptqWeight, rows: int, device: str) -> bool:
    """Compare with the plain product per channel; False if the kernel does not support it."""
    columns, n = weight.shape[1], weight.shape[0]
    x = _inputs(rows, columns, rows + 2)
    q, step = rptq_quant.rptq_quant(
        rptq_quant.RptqQuantInputs(
            x,
            weight.perm,
            weight.inv_input_scales,
            weight.input_zero_points,
            weight.bits,
            weight.group_size,
        )
    )
    expected, size = _plain(weight, q, step)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(3))
    on_device = weight.to(device)
    used = on_device.input_scales if step is None else step.to(device)
    grids = (on_device.weight, on_device.scale, on_device.offset, on_device.group_size)
    addends = (on_device.zero_point_bias, bias.to(device))
    inputs = rptq_linear.RptqLinearInputs(q.to(device), *grids, used, *addends, torch.float32)
    if name != "torch" and not registry.backend_serves_args("rptq_linear", name, inputs):
        return False
    actual = (module.run if name != "torch" else module.rptq_linear)(inputs).cpu().double()
    error = (actual - bias.double() - expected).abs()
    # float32: a sum of as many parts as there are groups, each rounded a few times
    bound = 2.0**-23 * (8 * size + expected.abs() + bias.abs() + 1e-6)
    assert bool((error <= bound).all()), (
        f"{rows} rows: {float((error / bound).max()):.3g} of the bound"
    )
    return True


def _available(name: str, device: str) -> ModuleType:
    """The module of that name, if its kernel runs on the device; else the test is skipped."""
    module = dict(_kernels())[name]
    reason = None if name == "torch" else module.unavailable_reason(device)
    if reason is not None:
        pytest.skip(reason)
    return module


@pytest.mark.parametrize("name", [name for name, _ in _kernels()])
@pytest.mark.parametrize(("columns", "n"), SHAPES)
@pytest.mark.parametrize(("bits", "mode"), BITS_AND_MODES)
def test_the_product_is_the_fake_quantized_one(
    name: str, columns: int, n: int, bits: str, mode: str
) -> None:
    module = _available(name, "cpu")
    for rows in ROWS if name != "triton" else (1, 7):
        _check(module, name, _weight(bits, mode, columns, n), rows, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, _ in _kernels()])
@pytest.mark.parametrize(("columns", "n"), [*SHAPES, (4100, 48)])
@pytest.mark.parametrize(("bits", "mode"), BITS_AND_MODES)
def test_the_product_on_the_gpu_is_the_fake_quantized_one(
    name: str, columns: int, n: int, bits: str, mode: str
) -> None:
    module = _available(name, "cuda")
    weight = _weight(bits, mode, columns, n)
    served = [_check(module, name, weight, rows, "cuda") for rows in ROWS]
    if not any(served):
        pytest.skip("the kernel leaves these shapes to another")


@pytest.mark.parametrize(("bits", "mode"), BITS_AND_MODES)
def test_fake_quantize_and_dense_multiply_to_the_output(bits: str, mode: str) -> None:
    weight, x = _weight(bits, mode, 100, 24), _inputs(33, 100, 8)
    actual = weight.matmul(x, None, registry.select_backends("cpu"))
    expected = weight.fake_quantize_input(x).double() @ weight.dequantize().double().T
    assert torch.allclose(
        actual.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max())
    )


def test_the_formula_with_zero_points_on_both_sides() -> None:
    """Σ_g s t (A − z·Wsum − y·Qsum + K·z·y) is what constant and offset come to."""
    weight, x = _weight("w4a8", "exact", 100, 24), _inputs(5, 100, 4)
    assert (  # noqa: PT018
        weight.offset is not None
        and weight.input_zero_points is not None
        and weight.input_scales is not None
    )
    # one zero-point and step a cluster, as the formula has them
    groups = weight.input_zero_points.view(-1, weight.group_size)
    zero = groups[:, :1].expand_as(groups).reshape(-1)
    factor = (1.0 / weight.input_scales).repeat_interleave(weight.group_size)
    weight = weight.with_static_input_scales(factor, zero, weight.input_scales)
    steps = (weight.inv_input_scales, weight.input_zero_points, 8, weight.group_size)
    q, _ = rptq_quant.rptq_quant(rptq_quant.RptqQuantInputs(x, weight.perm, *steps))
    out = torch.zeros(5, 24, dtype=torch.float64)
    for g in range(len(weight.input_scales)):
        part = slice(g * weight.group_size, (g + 1) * weight.group_size)
        real = weight.perm[part] >= 0
        w, q_group = weight.codes()[:, part].double()[:, real], q[:, part].double()[:, real]
        t, z = weight.scale[:, g].double(), float(groups[g, 0])
        y = -weight.offset[:, g].double() / t
        total = (
            q_group @ w.T
            - z * w.sum(1)
            - y * q_group.sum(1, keepdim=True)
            + int(real.sum()) * z * y
        )
        out += float(weight.input_scales[g]) * t * total
    actual = weight.matmul(x, None, registry.select_backends("cpu", {"rptq_linear": "torch"}))
    assert torch.allclose(actual.double(), out, rtol=0, atol=3e-5 * float(out.abs().max()))


def test_a_wrong_zero_point_group_or_order_shows() -> None:
    """The comparison above is one that faults fail."""
    weight, x = _weight("w8a8", "exact", 100, 24), _inputs(16, 100, 4)
    ops = registry.select_backends("cpu")
    expected = weight.matmul(x, None, ops)
    scale = float(expected.abs().max())
    assert weight.input_zero_points is not None and weight.input_scales is not None  # noqa: PT018
    faults = [
        replace(weight, input_zero_points=weight.input_zero_points + 1),
        replace(weight, input_scales=weight.input_scales.roll(1)),
        replace(weight, perm=weight.perm.flip(0)),
        replace(weight, zero_point_bias=torch.zeros(24)),
    ]
    for wrong in faults:
        assert float((wrong.matmul(x, None, ops) - expected).abs().max()) > 1e-3 * scale


def test_columns_without_a_channel_stay_zero() -> None:
    """Their weight may be anything: a cluster of one channel in a group of 32 is that channel
    alone.
    """
    weight = _weight("w4a8", "exact", 100, 24)
    sizes = (weight.perm.view(-1, weight.group_size) >= 0).sum(1)
    assert 1 in sizes.tolist()
    x = _inputs(7, 100, 4)
    steps = (weight.inv_input_scales, weight.input_zero_points, 8, weight.group_size)
    q, _ = rptq_quant.rptq_quant(rptq_quant.RptqQuantInputs(x, weight.perm, *steps))
    assert not bool(q[:, weight.perm < 0].any())


@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.parametrize("rows", [1, 7])
def test_sums_that_the_offset_takes_away_leave_no_errors(name: str, rows: int) -> None:
    """Inputs a little beside a far zero-point: sums of codes are thousands of times the output."""
    module = _available(name, "cpu")
    generator = torch.Generator().manual_seed(6)
    columns, n, group, zero = 3200, 48, 32, 60
    codes = torch.randint(0, 16, (n, columns), generator=generator)
    scale = (torch.rand(n, columns // group, generator=generator) + 0.5).half()
    offset = -7.5 * scale
    q = zero + torch.randint(-2, 3, (rows, columns), generator=generator)
    step = torch.rand(columns // group, generator=generator) + 0.5
    wide = codes * scale.double().repeat_interleave(group, 1)
    wide += offset.double().repeat_interleave(group, 1)
    wide *= step.double().repeat_interleave(group)
    inputs = rptq_linear.RptqLinearInputs(
        q.to(torch.int8), pack_codes(codes), scale, offset, group, step,
        (-zero * wide.sum(1)).float(), None, torch.float32,
    )  # fmt: skip
    actual = (module.run if name != "torch" else module.rptq_linear)(inputs).double()
    exact = (q - zero).double() @ wide.T
    assert float((actual - exact).norm() / exact.norm()) < 1e-4
