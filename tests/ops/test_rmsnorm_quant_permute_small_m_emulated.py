"""rmsnorm_quant_permute_small_m.cu on a CPU, launched by its own Python, against the reference:
int8 and fp8, every way to scale."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from modelmill.ops.add_rms_norm_quant import add_rms_norm_quant
from modelmill.ops.cuda.norm_quantize import rmsnorm_quant_permute
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.rms_norm_quant import TOLERANCE, rms_norm_quant
from tests.ops.emulation.cases import mistakes
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation

slow = pytest.mark.slow
pytestmark = requires_emulation
BF, HF, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
EPS = 1e-5


def per_column(width: int, columns: int, way: str) -> tuple[torch.Tensor | None, ...]:
    """Factor, zero-point, order: some columns twice, some never, some of the values none.

    way: what a factor is for.
    """
    generator = torch.Generator().manual_seed(width + columns)
    order = torch.randint(0, width, (columns,), generator=generator).int()
    order[::7] = -1
    factor = torch.rand(columns, generator=generator) * 40 + 10
    zero = torch.randint(-90, 90, (columns,), generator=generator).int()
    ways = {
        "token": (None, None),
        "all": (factor[:1], None),
        "column": (factor, None),
        "shifted": (factor, zero),
    }
    return (*ways[way], order)


def steps(values: torch.Tensor) -> torch.Tensor:
    """Numbers of the values in their type's order: next to each other are next to each other."""
    if values.dtype is INT8:
        return values.int()
    bits = values.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


class Case(NamedTuple):
    """size: rows, columns of x, of the values.

    way: what a factor is for. add: whether there is a residual.
    """

    size: tuple[int, int, int]
    way: str
    quant_dtype: torch.dtype
    dtype: torch.dtype
    add: bool
    bits: int


def case_error(emulator: Emulator, case: Case) -> float:
    """The most steps that a value is off, all if something else is wrong."""
    (rows, width, columns), way, quant_dtype, dtype, add, bits = case
    generator = torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(2, rows, width, generator=generator) * 3).to(dtype)
    weight = (torch.randn(width, generator=generator) + 1).to(dtype)
    factor, zero, order = per_column(width, columns, way)
    updated_residual = residual.clone() if add else None
    emulator.preceding_writes = lambda name, arguments: memory_ranges(x, updated_residual)
    spec = ActQuantSpec(quant_dtype, factor, zero, order, bits)
    values, scale = rmsnorm_quant_permute.rms_norm_quant(x, updated_residual, weight, EPS, spec)
    if updated_residual is not None:
        expected, of_rows, total = add_rms_norm_quant(x, residual, weight, EPS, spec)
        alike = torch.equal(updated_residual, total)
    else:
        expected, of_rows = rms_norm_quant(x, weight, EPS, spec)
        alike = True
    if of_rows is not None:
        assert scale is not None
        alike = alike and torch.allclose(scale, of_rows, rtol=float(torch.finfo(dtype).eps), atol=0)
    if not alike or values.float()[:, order == -1].any():
        return float("inf")
    return float((steps(values) - steps(expected)).abs().max())


@pytest.mark.parametrize(
    "case",
    [
        Case((1, 96, 112), "token", INT8, BF, False, 8),
        Case((3, 576, 320), "shifted", INT8, HF, True, 8),
        Case((2, 320, 320), "token", FP8, BF, True, 8),
        pytest.param(Case((1, 4096, 4224), "shifted", INT8, BF, True, 4), marks=slow),
        pytest.param(Case((2, 1600, 8192), "token", INT8, HF, True, 8), marks=slow),
        pytest.param(Case((1, 8192, 16), "all", INT8, BF, False, 8), marks=slow),
        pytest.param(Case((5, 48, 64), "column", INT8, BF, False, 4), marks=slow),
        pytest.param(Case((5, 1040, 1040), "column", FP8, HF, False, 8), marks=slow),
        pytest.param(Case((1, 512, 528), "all", FP8, BF, True, 8), marks=slow),
    ],
)
def test_values_and_scales(emulator: Emulator, case: Case) -> None:
    assert case_error(emulator, case) <= TOLERANCE[case.dtype]
    assert emulator.launched == [("rmsnorm_quant_permute_small_m", case.size[0])]


MISTAKES = {
    "columns that are none": ("valid ? places[i] : WIDTH;", "valid ? places[i] : 0;"),
    "sums of no warp": "if (t < 32) sums[t] = 0.0f, amaxes[t] = 0;",
    "sums not met for": ("    __syncthreads();\n    sum = 0.0f;", "    sum = 0.0f;"),
    "the row not met for": ("    __syncthreads();\n    float by", "    float by"),
    "the kernel in front not waited for": "    pdl_wait();\n",
    "upper halves left out": ("max(amax & 0xFFFF, amax >> 16)", "amax & 0xFFFF"),
    "half of the residual left out": ("low(v[i]) + low(o[i])", "low(v[i])"),
}


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    case = Case((4, 320, 336), "token", INT8, BF, True, 8)
    assert emulator.detects(change, lambda: case_error(emulator, case) <= TOLERANCE[BF])
