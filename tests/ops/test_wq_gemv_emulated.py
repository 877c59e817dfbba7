"""wq_gemv.cu on a CPU: its threads as fibers, its copies late and in any order, against float64.

What no emulation sees is the hardware's timing and memory model; that is for the GPU tests of the
ops.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.weight_formats import calibrated_rptq_weight
from modelmill.ops import int8_group_linear
from modelmill.ops.cuda.weight_only_gemm import wq_gemv
from modelmill.ops.int4_linear import dequantize_weight, random_weight
from modelmill.ops.kernel_support import make_gemm_problem
from modelmill.ops.rptq_linear import RptqLinearInputs, rptq_linear
from modelmill.weights import rptq
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation

slow = pytest.mark.slow
pytestmark = requires_emulation
BF, F32 = torch.bfloat16, torch.float32


def run(
    emulator: Emulator,
    x: torch.Tensor,
    grids: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int],
    more: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    *,
    dtype: torch.dtype = F32,
    gated: bool = False,
) -> torch.Tensor:
    weight, scale, offset, group = grids
    assert wq_gemv.supports_problem(make_gemm_problem(x, weight, scale, group=group, offset=offset))
    assert wq_gemv.supports_operands(x, weight, scale, offset)
    emulator.preceding_writes = lambda name, arguments: memory_ranges(x)
    return wq_gemv.wq_gemv(x, weight, (scale, offset, group), more, dtype, gated=gated)


def random_int4_weight(
    n: int, k: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Of 4 bits."""
    tensors = random_weight(n, k, group, device="cpu", symmetric=symmetric)
    assert tensors["weight"] is not None and tensors["scale"] is not None  # noqa: PT018
    return tensors["weight"], tensors["scale"], tensors["offset"], group


def wild(k: int) -> torch.Tensor:
    """With outliers, and values of all sizes."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(1, k, generator=generator) * torch.exp(
        2 * torch.randn(1, k, generator=generator)
    )
    x[:, ::37] *= 30
    return x.to(BF)


@pytest.mark.parametrize(
    ("n", "k", "group"),
    [
        pytest.param(96, 4096, 128, marks=slow),
        (160, 576, 128),
        pytest.param(32, 11008, 128, marks=slow),
        (64, 1056, 32),
        pytest.param(64, 1120, 64, marks=slow),
        (32, 1024, 256),
    ],
)
def test_four_bits(emulator: Emulator, n: int, k: int, group: int) -> None:
    x, grids = wild(k), random_int4_weight(n, k, group, symmetric=n == 96)
    expected = x.double() @ dequantize_weight(*grids, k, torch.float64).T
    assert (run(emulator, x, grids).double() - expected).norm() < 1e-6 * expected.norm()


@slow
@pytest.mark.parametrize("bits", [4, 8])
def test_gated(emulator: Emulator, bits: int) -> None:
    weight, scale, offset, group = random_int4_weight(96, 4096, 128, symmetric=False)
    full = dequantize_weight(weight, scale, offset, group, 4096, torch.float64)
    if bits == 8:
        weight, scale, offset, group = (
            torch.randint(-128, 128, (96, 4096)).to(torch.int8),
            torch.rand(96) / 4096,
            None,
            4096,
        )
        full = weight.double() * scale.double()[:, None]
    gate, up = (torch.ones(1, 4096).to(BF).double() @ full.T).to(BF).double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    out = run(
        emulator,
        torch.ones(1, 4096, dtype=BF),
        (weight, scale, offset, group),
        dtype=BF,
        gated=True,
    )
    assert (out.double() - expected).norm() < 8e-3 * expected.norm()


@pytest.mark.parametrize(("n", "k"), [pytest.param(80, 4096, marks=slow), (32, 672)])
def test_eight_bits(emulator: Emulator, n: int, k: int) -> None:
    weight = torch.randint(-128, 128, (n, k)).to(torch.int8)
    scale = torch.rand(n) + 0.5
    expected = wild(k).double() @ (weight.double() * scale.double()[:, None]).T
    assert (
        run(emulator, wild(k), (weight, scale, None, k)).double() - expected
    ).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    ("n", "k", "group", "symmetric"),
    [
        (48, 672, 32, True),
        (32, 608, 64, False),
        (32, 2048, 128, False),
        pytest.param(80, 4096, 32, False, marks=slow),
        pytest.param(64, 4096, 64, True, marks=slow),
        pytest.param(32, 11008, 32, True, marks=slow),
        pytest.param(32, 1120, 256, False, marks=slow),
    ],
)
def test_eight_bits_in_groups(
    emulator: Emulator, n: int, k: int, group: int, symmetric: bool
) -> None:
    tensors = int8_group_linear.random_weight(n, k, group, device="cpu", symmetric=symmetric)
    weight, scale, offset = tensors["weight"], tensors["scale"], tensors["offset"]
    assert weight is not None
    assert scale is not None
    for dtype in (torch.float16, F32):
        grids = (weight, scale.to(dtype), None if offset is None else offset.to(dtype), group)
        expected = (
            wild(k).double() @ int8_group_linear.dequantize_weight(*grids, k, torch.float64).T
        )
        assert (run(emulator, wild(k), grids).double() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [pytest.param(4096, marks=slow), 4224])
def test_clustered_integers(emulator: Emulator, bits: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    rptq_weight = calibrated_rptq_weight(
        rptq.RptqWeight.pack(
            torch.randn(48, k, generator=generator) * k**-0.5, BF, weight_bits=bits
        )
    )
    columns = rptq_weight.perm.numel()
    x = torch.randint(-128, 128, (1, columns), generator=generator).to(torch.int8)
    grids, more = (
        (rptq_weight.weight, rptq_weight.scale, rptq_weight.offset, rptq_weight.group_size),
        (rptq_weight.input_scales, rptq_weight.zero_point_bias, None),
    )
    expected = rptq_linear(RptqLinearInputs(x, *grids, *more, F32)).double()
    assert (run(emulator, x, grids, more).double() - expected).norm() < 1e-6 * expected.norm()


@slow
@pytest.mark.parametrize(
    "change",
    [
        ("            mbarrier_wait(full_of(warp, stage), parity);\n", ""),
        ("        mbarrier_wait(scales_full(slot), scale_parity);\n", ""),
        (
            "row_of(int quad) { return quad / 2 + quad % 2 * 4; }",
            "row_of(int quad) { return quad; }",
        ),
        ("if (++stage == STAGES) stage = 0, parity ^= 1;", "if (++stage == STAGES) stage = 0;"),
        ("16 * ints[i] - upper", "16 * ints[i]"),
        ("    pdl_wait();\n", ""),
    ],
    ids=[
        "lines not waited for",
        "scales not waited for",
        "rows elsewhere",
        "parity forgotten",
        "upper halves kept",
        "x not waited for",
    ],
)
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    """All but where a thread's rows are: any order of them is right, and only how banks are read
    hangs on it.
    """
    x, grids = wild(4096), random_int4_weight(192, 4096, 128, symmetric=False)
    expected = x.double() @ dequantize_weight(*grids, 4096, torch.float64).T

    def is_right() -> bool:
        return bool((run(emulator, x, grids).double() - expected).norm() < 1e-6 * expected.norm())

    assert emulator.detects(change, is_right) == ("row_of" not in change[0])
