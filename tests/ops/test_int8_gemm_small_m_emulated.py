"""int8_gemm_small_m.cu on a CPU, as its own Python launches it, against float64."""

from __future__ import annotations

import pytest
import torch

from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, wq_gemv
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from tests.ops.emulation.cases import slow_cases
from tests.ops.emulation.emulator import Emulator, requires_emulation
from tests.ops.groupwise_operands import ONE_GROUP, GemmCase, random_operands
from tests.ops.matmul_error import ROUNDING_LIMIT, matmul_error

pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32


def _serves_gemv(inputs: GroupwiseLinearInputs) -> bool:
    kernel = wq_gemv.make_gemv_kernel(gated=False)
    assert kernel.supports is not None
    return kernel.range.covers(make_groupwise_problem(*inputs)) and kernel.supports(inputs)


def error(emulator: Emulator, case: GemmCase) -> float:
    inputs, dense = random_operands(case)
    row_bytes = inputs.x.stride(0) * inputs.x.element_size()
    emulator.preceding_writes = lambda *_: [(inputs.x.data_ptr(), len(inputs.x) * row_bytes)]
    kernel = wq_gemv.groupwise_gemv if _serves_gemv(inputs) else int8_gemm_small_m.int8_mma_gemm
    actual = kernel(inputs, gated=case.gated)
    return matmul_error(actual, inputs.x, dense, inputs.bias, gated=case.gated)


@pytest.mark.parametrize(
    "case",
    [
        GemmCase((1, 33, 160), 32, BF, bits=8, symmetric=True, biased=True),
        GemmCase((3, 40, 1056), ONE_GROUP, BF, bits=8, grids=F32, gated=True, symmetric=True),
        *slow_cases(
            GemmCase((8, 56, 672), 64, HF, bits=8, biased=True),
            GemmCase((5, 72, 2144), 128, BF, bits=8),
            GemmCase((12, 40, 544), 32, BF, bits=8, grids=F32, biased=True),
            GemmCase((30, 66, 832), 64, BF, bits=8, gated=True, symmetric=True),
            GemmCase((64, 130, 1120), 256, HF, bits=8, biased=True),
            GemmCase((50, 48, 96), 32, BF, bits=8, gated=True),
        ),
    ],
)
def test_products(emulator: Emulator, case: GemmCase) -> None:
    assert error(emulator, case) < ROUNDING_LIMIT[case.dtype]
    assert [name for name, _ in emulator.launched] == ["int8_gemm_small_m"]


INSIDE = (
    "return K_TILE == 32 || at.column + K_TILE * k_tile + 64 * load < w.row_length;",
    "return true;",
)
SUMS = ("if (OFFSET) total[n][c] += first.y * sums[n][c],", "if (OFFSET)")
FRONT = ("    pdl_enter(w.tokens);\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [INSIDE, SUMS, FRONT], ids=["past a row's end", "sums of x", "x not waited for"]
)
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    case = GemmCase((3, 40, 1056), 128, BF, bits=8)
    assert emulator.detects(change, lambda: error(emulator, case) < ROUNDING_LIMIT[BF])
