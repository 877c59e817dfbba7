"""Integer products against the fake-quantized product in float64, up to float32 rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.int8_linear import quantize
from modelmill.ops.quant_types import ActQuantSpec, quantize_per_row
from modelmill.ops.w8a8_linear import random_inputs, w8a8_linear

ROUNDING = 2.0**-24
VARIANTS = ["torch", *(name for name in registry.implementations("w8a8_linear") if name != "cuda")]
# The kernels of a GPU, and what the registry makes of them
ON_GPU = [
    pytest.param(name, marks=pytest.mark.gpu)
    for name in ("triton on a GPU", "the registry on a GPU")
]
MOST_INTERPRETED = 8_000  # sums: the interpreter runs one program after another


def kernel(variant: str) -> Callable[..., torch.Tensor]:
    if variant == "torch":
        return registry.adapt_to_named_args("w8a8_linear", w8a8_linear)
    if variant.endswith("GPU"):
        ops = registry.select_backends(
            "cuda", {"w8a8_linear": "triton"} if variant.startswith("triton") else None
        )
        assert ops.backends["w8a8_linear"] != "torch"
        return on_gpu(registry.adapt_to_named_args("w8a8_linear", ops.w8a8_linear))
    module = registry.implementations("w8a8_linear")[variant]
    reason = module.unavailable_reason("cpu")
    if reason is not None:
        pytest.skip(reason)
    return registry.adapt_to_named_args("w8a8_linear", module.run)


def on_gpu(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """With tensors of the CPU; what the kernel does not write is NaN."""

    def run_on_gpu(**args: Any) -> torch.Tensor:
        args = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in args.items()}
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return run(**args).cpu()
        finally:
            torch.use_deterministic_algorithms(False)

    return run_on_gpu


def fake_quantized(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, x_scale: torch.Tensor
) -> torch.Tensor:
    """Both rounded and back, multiplied in float64."""
    return (x.double() * x_scale.double()[:, None]) @ (weight.double() * scale.double()[:, None]).T


def check(
    run: Callable[..., torch.Tensor],
    args: dict[str, torch.Tensor],
    bias: torch.Tensor | None = None,
) -> None:
    expected = fake_quantized(**args)
    actual = run(**args, dtype=torch.float32, bias=bias).double()
    # a sum to float32, times two scales: three roundings; a bias: one more, of the whole
    bound = 3.01 * ROUNDING * expected.abs() + float64_noise(args)
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + 1.01 * ROUNDING * (expected.abs() + bound)
    assert bool(((actual - expected).abs() <= bound).all()), float(
        ((actual - expected).abs() - bound).max()
    )


def float64_noise(args: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the float64 product itself may be off by where its terms cancel."""
    terms = {
        name: tensor.abs() if tensor.dtype is not torch.int8 else tensor.int().abs()
        for name, tensor in args.items()
    }
    return fake_quantized(**terms) * args["x"].shape[1] * 2.0**-52


@pytest.mark.parametrize("variant", [*VARIANTS, *ON_GPU])
@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("columns", [576, 100, 33, 48])
def test_the_kernel_is_the_fake_quantized_product(variant: str, rows: int, columns: int) -> None:
    run, n = kernel(variant), 70 if columns != 48 else 72
    if variant == "triton":
        n = max(3, min(n, MOST_INTERPRETED // rows))
    for per_token, per_channel in ((True, True), (False, True), (True, False)):
        args = random_inputs(
            rows, columns, n, device="cpu", per_token=per_token, per_channel=per_channel
        )
        bias = torch.randn(n, generator=torch.Generator().manual_seed(rows)) if per_token else None
        check(run, args, bias)


@pytest.mark.parametrize("variant", [*VARIANTS, *ON_GPU])
def test_ends_of_the_range_and_rows_of_nothing(variant: str) -> None:
    """Sums as large as they can be (a row of −127 times −127), −128 of a foreign file, rows and
    columns of 0.
    """
    run, k = kernel(variant), 260
    x, weight = (
        torch.full((4, k), -127, dtype=torch.int8),
        torch.full((9, k), -127, dtype=torch.int8),
    )
    x[1], x[2], weight[3], weight[4] = 127, 0, 0, -128
    args = {"x": x, "weight": weight, "scale": torch.rand(9) + 0.5, "x_scale": torch.rand(4) + 0.5}
    check(run, args)
    assert not run(**args, dtype=torch.float32)[2].any()


@pytest.mark.parametrize("variant", [*VARIANTS, *ON_GPU])
def test_a_long_sum_does_not_overflow(variant: str) -> None:
    """127 · 127 · 40,001 is 645 million: far beyond what float16, or a sum of 24 bits, holds."""
    k = 40_001
    args = {
        "x": torch.full((2, k), 127, dtype=torch.int8),
        "weight": torch.full((3, k), 127, dtype=torch.int8),
    }
    args["weight"][1, ::2] = -127
    check(
        kernel(variant),
        args | {"scale": torch.ones(3), "x_scale": torch.ones(1).expand(2).contiguous()},
    )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 30), k=st.integers(1, 200), n=st.integers(1, 40), seed=st.integers(0, 99)
)
def test_products_of_any_size(rows: int, k: int, n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator) * 10 ** torch.randn(k, generator=generator)
    values, x_scale = quantize_per_row(x, torch.int8)
    weight, scale = quantize(torch.randn(n, k, generator=generator))
    args = {"x": values, "weight": weight, "scale": scale, "x_scale": x_scale}
    reference = registry.adapt_to_named_args("w8a8_linear", w8a8_linear)
    exact = reference(**args, dtype=torch.float32)
    check(reference, args)
    if "cpu" in VARIANTS and kernel("cpu") is not None:
        assert torch.equal(kernel("cpu")(**args, dtype=torch.float32), exact), (
            "whole numbers: the same bits"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_rows_are_rounded_alike_everywhere(dtype: torch.dtype, static: bool) -> None:
    """Bit for bit: what an engine computes does not hang on the kernel that rounds its
    activations.
    """
    x = (torch.randn(9, 101, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    x[3], x[:, 7] = 0.0, x[:, 7] * 30
    factor = torch.tensor([3.7]) if static else None
    args = (x, ActQuantSpec(torch.int8, factor))
    values, scale = registry.reference("quantize")(*args)
    for name in ("cpu",):
        module = registry.implementations("quantize")[name]
        if module.unavailable_reason("cpu") is None:
            actual = module.run(*args)
            assert torch.equal(actual[0], values)
            assert (actual[1] is None and scale is None) or torch.equal(actual[1], scale)


def test_what_is_no_number_stays_none() -> None:
    x = torch.ones(3, 40)
    x[1, 5] = float("nan")
    for op in (registry.reference("quantize"), registry.select_backends("cpu").quantize):
        values, scale = op(x, ActQuantSpec(torch.int8))
        assert torch.equal(scale.isnan(), torch.tensor([False, True, False]))
        assert values[0].tolist() == [127] * 40
