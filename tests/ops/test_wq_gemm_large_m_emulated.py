"""wq_gemm_large_m.cu on a CPU, launched by its own Python, against float64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from modelmill.ops import int4_linear, int8_group_linear
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_large_m
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_large_m import LargeMConfig, PlannedLaunch
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_tile import (
    WeightTileRange,
    count_weight_tiles,
    problem_weight_spec,
    supports_weight,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from tests.ops.emulation.cases import mistakes, slow_cases
from tests.ops.emulation.emulator import Emulator, mapped_range, requires_emulation
from tests.ops.groupwise_operands import ONE_GROUP, GemmCase, random_operands
from tests.ops.matmul_error import matmul_error

pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
# of the whole, in the norm: rounding of the weight and the output; a gate multiplies two of them
LIMIT, GATED_LIMIT = {BF: 4e-3, HF: 6e-4}, {BF: 6e-3, HF: 9e-4}


def x_in_front(_: str, arguments: tuple[bytes, ...]) -> list[tuple[int, int]]:
    return mapped_range(arguments[0])


def one_launch(rows: int, config: tuple[int, int]) -> tuple[PlannedLaunch, ...]:
    return (PlannedLaunch(LargeMConfig(*config), WeightTileRange(0, count_weight_tiles(rows))),)


def error(
    emulator: Emulator,
    case: GemmCase,
    config: tuple[int, int],
    plan: tuple[PlannedLaunch, ...] = (),
) -> float:
    """config: rows of x of a block, split of K. plan: other launches than one of this config."""
    _, rows, _ = case.size
    # not 0 in the mean: an error that all weights of a row share does not cancel
    inputs, dense = random_operands(case, mean=0.5)
    emulator.preceding_writes = x_in_front
    spec = problem_weight_spec(make_groupwise_problem(*inputs), wq_gemm_large_m.K_TILE)
    assert supports_weight(rows, spec, gated=case.gated)
    assert wq_gemm_large_m.fits_shared_memory(spec, LargeMConfig(*config))
    plan = plan or one_launch(rows, config)
    actual = wq_gemm_large_m.wq_gemm(inputs, plan, gated=case.gated)
    return matmul_error(actual, inputs.x, dense, inputs.bias, gated=case.gated)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (GemmCase((70, 136, 352), 128, BF, biased=True), (128, 1)),
        (GemmCase((140, 144, 544), ONE_GROUP, HF, gated=True, symmetric=True), (192, 1)),
        (GemmCase((257, 136, 224), 32, BF), (256, 1)),
        (
            GemmCase((70, 136, 352), ONE_GROUP, BF, bits=8, grids=F32, symmetric=True, biased=True),
            (128, 1),
        ),
        (GemmCase((140, 144, 544), 32, HF, bits=8, gated=True), (192, 1)),
        *slow_cases(
            (GemmCase((65, 72, 1056), 256, BF), (128, 2)),
            (GemmCase((300, 264, 672), 64, HF, biased=True), (256, 1)),
            (GemmCase((130, 208, 2144), 64, BF, gated=True), (192, 4)),
            (GemmCase((260, 144, 1568), 128, BF, symmetric=True, biased=True), (256, 3)),
            (GemmCase((200, 72, 1056), 32, HF, symmetric=True), (128, 2)),
            (GemmCase((129, 16, 96), 96, BF, gated=True), (192, 1)),
            (GemmCase((256, 400, 2080), 512, HF, gated=True, biased=True), (256, 2)),
            (GemmCase((257, 136, 224), 128, BF, bits=8, biased=True), (256, 1)),
            (GemmCase((257, 264, 1568), 64, BF, bits=8), (256, 3)),
            (
                GemmCase(
                    (200, 80, 1056), ONE_GROUP, HF, bits=8, grids=F32, gated=True, symmetric=True
                ),
                (128, 2),
            ),
            (GemmCase((130, 208, 2144), 256, BF, bits=8, symmetric=True), (192, 4)),
        ),
    ],
)
def test_products(emulator: Emulator, case: GemmCase, config: tuple[int, int]) -> None:
    assert error(emulator, case, config) < (GATED_LIMIT if case.gated else LIMIT)[case.dtype]
    assert [name for name, _ in emulator.launched] == ["wq_gemm_large_m"]


def largest_output_of_zeros(emulator: Emulator, of: ModuleType, scales: torch.dtype) -> float:
    """The largest output of a weight whose codes all mean 0, in one group."""
    tensors = of.random_weight(72, 128, 128, device="cpu", symmetric=True)
    weight = torch.full_like(tensors["weight"], 0x88 if of is int4_linear else 0)
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).to(HF) + 1
    emulator.preceding_writes = x_in_front
    scale = tensors["scale"].to(scales) * 1.2345678
    inputs = GroupwiseLinearInputs(x, weight, scale, None, 128, None)
    return float(wq_gemm_large_m.wq_gemm(inputs, one_launch(72, (128, 1)), gated=False).abs().max())


@pytest.mark.parametrize(("of", "scales"), [(int8_group_linear, F32), (int4_linear, HF)])
def test_codes_of_zero_add_nothing(emulator: Emulator, of: ModuleType, scales: torch.dtype) -> None:
    assert largest_output_of_zeros(emulator, of, scales) == 0


@pytest.mark.parametrize("gated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_weight_in_two_launches(emulator: Emulator, gated: bool) -> None:
    plan = (
        PlannedLaunch(LargeMConfig(192, 1), WeightTileRange(0, 2)),
        PlannedLaunch(LargeMConfig(128, 2), WeightTileRange(2, 1)),
    )
    case = GemmCase((130, 656 if gated else 328, 1056), 128, BF, gated=gated)
    if gated:
        plan = (plan[0], plan[1]._replace(tiles=WeightTileRange(2, 4)))
    limit = (GATED_LIMIT if gated else LIMIT)[BF]
    assert error(emulator, case, (192, 1), plan) < limit
    assert [name for name, _ in emulator.launched] == ["wq_gemm_large_m"] * 2


WAIT_FOR_EMPTY = "mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);\n"
WAIT_FULL = "mbarrier_wait(shared_address(&barriers.{0}.full[{1}.stage]), {1}.parity);\n"
WAIT_EMPTY = "mbarrier_wait(shared_address(&barriers.{0}.empty[{1}.stage]),{2}{1}.parity ^ 1);\n"
MISTAKES = {
    "tiles not waited for": (WAIT_FULL.format("tiles", "at"), "\n"),
    "stages filled too early": (f"{WAIT_FOR_EMPTY}                load_w(", "load_w("),
    "wgmmas not waited for": "        wgmma_wait<PENDING>();\n",
    "a stage given back while its products run": (
        "barriers.tiles.empty[previous]", "barriers.tiles.empty[state.stage]",
    ),
    "the last stage of a tile not given back": (
        "        release_previous();\n        previous = -1;", "        previous = -1;",
    ),
    "scales staged too early": (f"{WAIT_FOR_EMPTY}            stage_scales<", "stage_scales<"),
    "the first tile's scales in all tiles": ("scale_buffer(w, grids, scale_state.stage)", "grids"),
    "columns of a row not transposed": ("{transpose_8x8(low_pair)", "{(low_pair)"),
    "the first rows of x in every block": ("w.m_tiles) * BLOCK_M,", "w.m_tiles) * 0,"),
    "the kernel in front not waited for": (
        "pdl_wait();\n        for (int i = 0; i < ahead", "for (int i = 0; i < ahead",
    ),
    "the reading's magic kept": ("fmaf(-magic, own, offset)", "offset"),
    "scales of more bits than the reading has room for": (
        "(__float_as_uint(scale) + 256) & ~511u", "__float_as_uint(scale)",
    ),
    "high nibbles' step": ("of_reading(128, 0.125f)", "of_reading(128, 0.25f)"),
}  # fmt: skip


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    def is_right() -> bool:
        if "__float_as_uint" in change[0]:
            return largest_output_of_zeros(emulator, int8_group_linear, F32) == 0
        return error(emulator, GemmCase((140, 264, 1056), 256, BF), (128, 1)) < LIMIT[BF]

    assert emulator.detects(change, is_right)
