"""wq_gemm_small_m.cu on a CPU, as its own Python launches it, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from modelmill.ops import int4_linear, int8_group_linear
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_small_m
from modelmill.ops.groupwise import make_groupwise_problem
from tests.ops.emulation.emulator import (
    Emulator,
    memory_ranges,
    mistakes,
    requires_emulation,
    slow_cases,
)
from tests.ops.groupwise_operands import random_operands
from tests.ops.matmul_error import matmul_error

pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF: 3e-3, HF: 5e-4}  # of the whole, in the norm: the output's own rounding
ALL = 1 << 20  # one group
NUM_SMS = 8


def error(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    of: ModuleType = int4_linear,
    grids: torch.dtype = HF,
    **switches: bool,
) -> float:
    """size: tokens, rows and columns of the weight. of: its op. grids: type of its scales.
    switches: gated, symmetric, biased."""
    gated = switches.get("gated", False)
    inputs, dense = random_operands(size, group, dtype, of, grids, switches)
    emulator.preceding_writes = lambda name, arguments: memory_ranges(*inputs.x)
    problem = make_groupwise_problem(*inputs)
    spec, tiles = wq_gemm_small_m.problem_spec(problem), problem.n // 16
    config = wq_gemm_small_m.config_for(spec, problem.k, problem.groups, tiles, NUM_SMS)
    assert config is not None
    actual = wq_gemm_small_m.wq_gemm(inputs, config, gated=gated)
    return matmul_error(actual, inputs.x, dense, inputs.bias, gated=gated)


@pytest.mark.parametrize(
    ("size", "group", "dtype", "switches"),
    [
        ((8, 96, 1024), 128, BF, {}),
        ((3, 288, 1024), 32, HF, {"biased": True}),
        ((9, 64, 1536), 64, BF, {"symmetric": True}),
        ((5, 48, 4608), 256, HF, {"gated": True, "biased": True}),
        *slow_cases(
            ((16, 96, 5120), 128, BF, {"gated": True}),
            ((4, 640, 2048), 128, BF, {"symmetric": True}),
            ((2, 96, 8704), ALL, BF, {}),
            ((12, 64, 8960), 128, HF, {"biased": True}),
            ((7, 160, 3584), 64, HF, {"gated": True, "symmetric": True}),
            ((16, 32, 17408), 512, BF, {}),
            ((8, 32, 33280), 128, HF, {}),
            ((2, 48, 33280), 256, BF, {}),  # three tiles, two passes: slots change finishers
        ),
    ],
)
def test_four_bits(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    switches: dict[str, bool],
) -> None:
    assert error(emulator, size, group, dtype, **switches) < LIMIT[dtype]
    assert [name for name, _ in emulator.launched] == ["wq_gemm_small_m"]


@pytest.mark.parametrize(
    ("size", "group", "dtype", "grids", "switches"),
    [
        ((8, 96, 1024), 128, BF, HF, {}),
        ((3, 32, 896), 32, HF, HF, {"biased": True}),
        ((16, 96, 2048), ALL, BF, F32, {"gated": True, "symmetric": True}),
        *slow_cases(
            ((9, 64, 1536), 64, BF, HF, {"symmetric": True}),
            ((6, 64, 8704), 128, HF, HF, {"gated": True, "biased": True}),
            ((2, 48, 4352), ALL, HF, F32, {"symmetric": True, "biased": True}),
            ((13, 48, 9216), 256, BF, HF, {}),
        ),
    ],
)
def test_eight_bits(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    grids: torch.dtype,
    switches: dict[str, bool],
) -> None:
    assert error(emulator, size, group, dtype, int8_group_linear, grids, **switches) < LIMIT[dtype]


MISTAKES = {
    "weights not waited for": (
        "mbarrier_wait(shared_address(&barriers().full[stage.index]), stage.parity);\n",
        "",
    ),
    "stages filled too early": (
        "mbarrier_wait(shared_address(&barriers().empty[stage.index]), stage.parity ^ 1);\n",
        "",
    ),
    "scales not waited for": (
        "mbarrier_wait(shared_address(&barriers().scales[slot.index]), slot.parity);\n",
        "",
    ),
    "sums not waited for": (
        "mbarrier_wait(shared_address(&barriers().sums[slot.index]), slot.parity);\n",
        "",
    ),
    "sums of the other blocks not waited for": (
        "if (SPLIT > 1) mbarrier_wait(peers_full(layout, own), 0);\n",
        "",
    ),
    "the kernel in front not waited for": (
        "pdl_wait();\n        multiply_tiles",
        "multiply_tiles",
    ),
    "a slot given back before its sums are added": (
        "const int then = number + SLOTS;",
        "const int then = number + SLOTS - 1;",
    ),
    "columns of the next block": ("min(lines.end * LINE_COLUMNS, w.columns)", "w.columns"),
    "the base kept": ("offset - CODE_BASE * scale", "offset"),
    "earlier passes forgotten": ("pass ? earlier : 0", "0"),
    "the rows of another half": ("place + 1024", "place"),
    "the owner's own place": ("rank - (rank > owner)", "0 * (rank > owner)"),
    "the next line's scales": (
        "min(line, w.lines - 1) * PARTS",
        "min(line + 1, w.lines - 1) * PARTS",
    ),
}


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    size = (8, 96, 8448)
    if "earlier" in change[0]:
        size = (8, 16, 33280)
    elif "lines.end" in change[0]:
        size = (3, 16, 17408)
    assert emulator.detects(change, lambda: error(emulator, size, 128, BF) < LIMIT[BF])
