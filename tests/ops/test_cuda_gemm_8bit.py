"""Products of many rows in 8 bits on Hopper: every form of the kernel, sizes around its tiles,
every output.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import fp8_linear, w8a8_linear
from modelmill.ops.cuda.w8a8_gemm import gemm_8bit
from modelmill.ops.w8a8_linear import Linear8BitInputs, make_linear_8bit_problem
from tests.ops.nvcc import compiles_without_spills, requires_nvcc
from tests.ops.test_integer_linear import fake_quantized, float64_noise

CONFIGS = [
    pytest.param(config, id=f"{config[0] * 64}x{config[1]}{'-turns' if config[2] else ''}")
    for config in gemm_8bit.KERNEL_CONFIGS
]


def _need() -> None:
    reason = gemm_8bit.unavailable_reason("cuda")
    if reason is not None:
        pytest.skip(reason)


def _run(args: dict[str, Any], **more: Any) -> torch.Tensor:
    """On the GPU; what the kernel does not write is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        config, gated = more.pop("config", None), more.pop("gated", False)
        inputs = Linear8BitInputs(**args, **more)
        return gemm_8bit.run(inputs, gated=gated, config=config)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 7, 64, 129, 1000, 2100])
def test_whole_numbers_are_exact_but_for_the_scales(
    config: gemm_8bit.Gemm8BitKernelConfig, rows: int
) -> None:
    """Channels × 30, K not a multiple of 128, N not of a tile: float64 but for three roundings of
    float32.
    """
    _need()
    for k, n, biased in ((16, 8, False), (592, 72, True), (1040, 520, False), (4096, 1032, True)):
        args = w8a8_linear.random_inputs(rows, k, n, device="cuda", per_token=rows != 7)
        expected = fake_quantized(**args)
        most = 3.01 * 2.0**-24 * expected.abs() + float64_noise(args)
        bias = torch.randn(n, device="cuda") if biased else None
        if bias is not None:
            expected = expected + bias.double()
            most = most + 1.01 * 2.0**-24 * (expected.abs() + most)
        actual = _run(args, dtype=torch.float32, bias=bias, config=config).double()
        assert bool(((actual - expected).abs() <= most).all()), (
            f"{k} {n}: {float((actual - expected).abs().max())}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_the_wide_ones_rounded(
    config: gemm_8bit.Gemm8BitKernelConfig, dtype: torch.dtype
) -> None:
    _need()
    for rows, k, n in ((5, 592, 72), (300, 1040, 520)):
        args = w8a8_linear.random_inputs(rows, k, n, device="cuda")
        bias = torch.randn(n, device="cuda", dtype=dtype)
        wide = _run(args, dtype=torch.float32, bias=bias.float(), config=config)
        assert torch.equal(_run(args, dtype=dtype, bias=bias, config=config), wide.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 200, 1000])
def test_fp8(config: gemm_8bit.Gemm8BitKernelConfig, rows: int) -> None:
    _need()
    for k, n in ((592, 72), (4096, 1032)):
        args = fp8_linear.random_inputs(rows, k, n, device="cuda")
        wide = {a: t.double() for a, t in args.items()}
        expected = fp8_linear.fp8_linear(Linear8BitInputs(**wide, dtype=torch.float64))
        actual = _run(args, dtype=torch.float32, config=config).double()
        assert float((actual - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 129, 1000])
def test_gated(config: gemm_8bit.Gemm8BitKernelConfig, rows: int) -> None:
    """Halves that no tile divides; a gate that is far below 0, and one far above."""
    _need()
    if config[1] < 64:
        pytest.skip("too narrow for two halves")
    for k, inner, dtype in (
        (592, 72, torch.float32),
        (1040, 520, torch.bfloat16),
        (4096, 1032, torch.float16),
    ):
        args = w8a8_linear.random_inputs(rows, k, 2 * inner, device="cuda", outliers=300.0) | {
            "dtype": dtype
        }
        args["bias"] = torch.randn(2 * inner, device="cuda", dtype=dtype) if inner == 520 else None
        plain = _run(args, config=config)
        gate, up = plain.double().chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
        actual = _run(args, config=config, gated=True)
        assert actual.shape == expected.shape
        eps = 2.0**-20 + torch.finfo(dtype).eps
        assert bool(((actual.double() - expected).abs() <= eps * expected.abs() + 1e-6).all())


@pytest.mark.gpu
def test_long_sums_do_not_overflow() -> None:
    _need()
    x = torch.full((130, 40_000), 127, dtype=torch.int8, device="cuda")
    weight = torch.full((16, 40_000), -127, dtype=torch.int8, device="cuda")
    one = torch.ones(16, device="cuda")
    actual = _run({"x": x, "weight": weight, "scale": one, "x_scale": one[:1]}, dtype=torch.float32)
    assert bool((actual == -127 * 127 * 40_000).all())


def test_what_tma_cannot_read_is_left_to_others() -> None:
    x, weight = torch.zeros(80, 48, dtype=torch.int8), torch.zeros(16, 48, dtype=torch.int8)
    scale, bias = torch.ones(16), torch.zeros(16, dtype=torch.bfloat16)

    def is_supported(
        x: Any, weight: torch.Tensor = weight, bias: Any = bias, dtype: torch.dtype = torch.bfloat16
    ) -> bool:
        inputs = Linear8BitInputs(x, weight, scale, scale[:1], dtype, bias)
        sizes = gemm_8bit.gemm_support_range((1, 80))
        return sizes.covers(make_linear_8bit_problem(*inputs)) and gemm_8bit.supports(inputs)

    def quantized(x: torch.Tensor, **more: Any) -> Any:
        """A tensor that says it were on a GPU."""
        names = ("dim", "numel", "dtype", "shape", "is_contiguous", "data_ptr", "get_device")
        return SimpleNamespace(**{n: getattr(x, n) for n in names}, is_cuda=True, **more)

    assert is_supported(quantized(x))
    assert not is_supported(x)
    assert not is_supported(quantized(x[:, :40].contiguous()), weight[:, :40].contiguous())
    assert not is_supported(quantized(x[:, :32]), weight[:, :32])
    assert not is_supported(quantized(x), weight[:9])
    assert not is_supported(quantized(x), dtype=torch.float16)
    assert not is_supported(quantized(x.float()), weight.float())
    assert is_supported(quantized(x), bias=None, dtype=torch.float16)


def test_every_size_has_a_form_and_few_tiles_are_small() -> None:
    assert gemm_8bit.best_config(8192, 12288, 132) == (1, 256, 0)
    assert gemm_8bit.best_config(1024, 22016, 132, True) == (2, 128, 1)
    assert gemm_8bit.best_config(64, 4096, 132) == (1, 32, 1)
    assert gemm_8bit.best_config(65, 64, 132, True)[1] >= 64
    for config in gemm_8bit.KERNEL_CONFIGS:
        assert gemm_8bit._shared_bytes(config) <= gemm_8bit.MAX_SHARED_BYTES
        assert gemm_8bit._count_stages(config) >= 4


@requires_nvcc
@pytest.mark.parametrize("config", CONFIGS)
def test_forms_compile_without_spills(
    config: gemm_8bit.Gemm8BitKernelConfig, tmp_path: Path
) -> None:
    quant_dtype, dtype = (
        (torch.float8_e4m3fn, torch.float16) if config[1] == 64 else (torch.int8, torch.bfloat16)
    )
    gated = config[1] >= 64
    macros = gemm_8bit.kernel_macros(config, quant_dtype, dtype, ("BIAS=1", f"GATED={int(gated)}"))
    compiles_without_spills("gemm_8bit.cu", macros, tmp_path / "out")


@given(st.integers(1, 3000), st.integers(1, 300), st.booleans(), st.integers(17, 9000), st.data())
def test_forms_are_all_that_a_step_can_meet(
    sixteens: int, processors: int, gated: bool, most: int, data: st.DataObject
) -> None:
    few = 64 if gated else 16
    listed = gemm_8bit.warmup_row_counts(16 * sixteens, processors, few, most, gated)
    assert all(few < rows <= most for rows in listed)
    known = {gemm_8bit.best_config(rows, 16 * sixteens, processors, gated) for rows in listed}
    if few < most:
        rows = data.draw(st.integers(few + 1, most))
        assert gemm_8bit.best_config(rows, 16 * sixteens, processors, gated) in known
