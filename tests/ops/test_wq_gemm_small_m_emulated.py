"""wq_gemm_small_m.cu on a CPU, as its own Python launches it, against float64."""

from __future__ import annotations

import pytest
import torch

from modelmill.ops.cuda.weight_only_gemm import wq_gemm_small_m
from modelmill.ops.groupwise import make_groupwise_problem
from tests.ops.emulation.cases import mistakes, slow_cases
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation
from tests.ops.groupwise_operands import ONE_GROUP, GemmCase, random_operands
from tests.ops.matmul_error import ROUNDING_LIMIT, matmul_error

pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
NUM_SMS = 8


def error(emulator: Emulator, case: GemmCase) -> float:
    inputs, dense = random_operands(case)
    emulator.preceding_writes = lambda *_: memory_ranges(*inputs.x)
    problem = make_groupwise_problem(*inputs)
    spec, tiles = wq_gemm_small_m.problem_spec(problem), problem.n // 16
    config = wq_gemm_small_m.config_for(spec, problem.k, problem.groups, tiles, NUM_SMS)
    assert config is not None
    actual = wq_gemm_small_m.wq_gemm(inputs, config, gated=case.gated)
    return matmul_error(actual, inputs.x, dense, inputs.bias, gated=case.gated)


@pytest.mark.parametrize(
    "case",
    [
        GemmCase((8, 96, 1024), 128, BF),
        GemmCase((3, 288, 1024), 32, HF, biased=True),
        GemmCase((9, 64, 1536), 64, BF, symmetric=True),
        GemmCase((5, 48, 4608), 256, HF, gated=True, biased=True),
        GemmCase((8, 96, 1024), 128, BF, bits=8),
        GemmCase((3, 32, 896), 32, HF, bits=8, biased=True),
        GemmCase((16, 96, 2048), ONE_GROUP, BF, bits=8, grids=F32, gated=True, symmetric=True),
        *slow_cases(
            GemmCase((16, 96, 5120), 128, BF, gated=True),
            GemmCase((4, 640, 2048), 128, BF, symmetric=True),
            GemmCase((2, 96, 8704), ONE_GROUP, BF),
            GemmCase((12, 64, 8960), 128, HF, biased=True),
            GemmCase((7, 160, 3584), 64, HF, gated=True, symmetric=True),
            GemmCase((16, 32, 17408), 512, BF),
            GemmCase((8, 32, 33280), 128, HF),
            GemmCase((2, 48, 33280), 256, BF),  # three tiles, two passes: slots change finishers
            GemmCase((9, 64, 1536), 64, BF, bits=8, symmetric=True),
            GemmCase((6, 64, 8704), 128, HF, bits=8, gated=True, biased=True),
            GemmCase((2, 48, 4352), ONE_GROUP, HF, bits=8, grids=F32, symmetric=True, biased=True),
            GemmCase((13, 48, 9216), 256, BF, bits=8),
        ),
    ],
)
def test_products(emulator: Emulator, case: GemmCase) -> None:
    assert error(emulator, case) < ROUNDING_LIMIT[case.dtype]
    assert [name for name, _ in emulator.launched] == ["wq_gemm_small_m"]


WAIT = "mbarrier_wait(shared_address(&barriers()."
MISTAKES = {
    "weights not waited for": WAIT + "full[stage.index]), stage.parity);\n",
    "stages filled too early": WAIT + "empty[stage.index]), stage.parity ^ 1);\n",
    "scales not waited for": WAIT + "scales[slot.index]), slot.parity);\n",
    "sums not waited for": WAIT + "sums[slot.index]), slot.parity);\n",
    "sums of the other blocks not waited for": (
        "if (SPLIT > 1) mbarrier_wait(peers_full(layout, own), 0);\n"
    ),
    "the kernel in front not waited for": ("pdl_wait();\n        multiply_tiles", "multiply_tiles"),
    "a slot given back before its sums are added": (
        "const int then = number + SLOTS;", "const int then = number + SLOTS - 1;",
    ),
    "columns of the next block": ("min(lines.end * LINE_COLUMNS, w.columns)", "w.columns"),
    "the base kept": ("offset - CODE_BASE * scale", "offset"),
    "earlier passes forgotten": ("pass ? earlier : 0", "0"),
    "the rows of another half": ("place + 1024", "place"),
    "the owner's own place": ("rank - (rank > owner)", "0 * (rank > owner)"),
    "the next line's scales": (
        "min(line, w.lines - 1) * PARTS", "min(line + 1, w.lines - 1) * PARTS",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    size = (8, 96, 8448)
    if "earlier" in change[0]:
        size = (8, 16, 33280)
    elif "lines.end" in change[0]:
        size = (3, 16, 17408)
    assert emulator.detects(
        change, lambda: error(emulator, GemmCase(size, 128, BF)) < ROUNDING_LIMIT[BF]
    )
