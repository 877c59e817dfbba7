"""wq_gemm_pipelined.cu on a CPU, both kernels as their own Python launches them, against
float64.
"""

from __future__ import annotations

import pytest
import torch

from modelmill.ops.cuda.weight_only_gemm import wq_gemm_pipelined
from modelmill.ops.groupwise import make_groupwise_problem
from tests.ops.emulation.cases import mistakes, slow_cases
from tests.ops.emulation.emulator import Emulator, mapped_range, requires_emulation
from tests.ops.groupwise_operands import ONE_GROUP, GemmCase, random_operands
from tests.ops.matmul_error import ROUNDING_LIMIT, matmul_error

pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32


def x_in_front(name: str, arguments: tuple[bytes, ...]) -> list[tuple[int, int]]:
    """x of the products; wq_permute_and_sum has nothing in front that is ours to spoil."""
    return [] if name == "wq_permute_and_sum" else mapped_range(arguments[0])


def error(emulator: Emulator, case: GemmCase, split_k: int) -> float:
    tokens, rows, _ = case.size
    inputs, dense = random_operands(case)
    emulator.preceding_writes = x_in_front
    spec = wq_gemm_pipelined.problem_weight_spec(make_groupwise_problem(*inputs))
    assert wq_gemm_pipelined.supports_weight(rows, spec, gated=case.gated)
    block_rows = wq_gemm_pipelined.block_rows(tokens)
    assert wq_gemm_pipelined.fits_shared_memory(split_k, spec, block_rows)
    actual = wq_gemm_pipelined.wq_gemm(inputs, split_k, gated=case.gated)
    return matmul_error(actual, inputs.x, dense, inputs.bias, gated=case.gated)


@pytest.mark.parametrize(
    ("case", "split_k"),
    [
        (GemmCase((9, 136, 672), 128, BF, biased=True), 1),
        (GemmCase((33, 144, 544), ONE_GROUP, HF, gated=True, symmetric=True), 1),
        (GemmCase((10, 72, 1056), 256, BF), 2),
        (GemmCase((150, 136, 672), 128, BF, biased=True), 1),
        (GemmCase((11, 72, 672), 32, BF, biased=True), 1),
        (GemmCase((34, 144, 1056), 64, HF, gated=True, symmetric=True), 2),
        (GemmCase((16, 136, 1568), 64, BF), 3),
        (GemmCase((9, 72, 544), 32, BF, bits=8, biased=True), 1),
        (GemmCase((33, 144, 672), ONE_GROUP, HF, bits=8, grids=F32, gated=True, symmetric=True), 1),
        (GemmCase((10, 72, 1056), 64, BF, bits=8, symmetric=True), 2),
        *slow_cases(
            (GemmCase((20, 208, 2144), 64, BF, gated=True), 4),
            (GemmCase((64, 264, 2080), 256, HF), 2),
            (GemmCase((130, 520, 1568), 128, BF, symmetric=True, biased=True), 3),
            (GemmCase((64, 72, 4128), 32, HF, symmetric=True), 4),
            (GemmCase((140, 264, 800), 32, BF), 1),
            (GemmCase((131, 304, 2080), ONE_GROUP, HF, gated=True, symmetric=True), 1),
            (GemmCase((260, 264, 1056), 256, BF), 2),
            (GemmCase((65, 128, 2144), 128, HF, gated=True, biased=True), 4),
            (GemmCase((64, 400, 2080), 128, BF, gated=True, biased=True), 1),
            (GemmCase((40, 264, 2144), 512, HF), 2),
            (GemmCase((9, 128, 4128), 128, HF, gated=True), 2),
            (GemmCase((64, 8, 3104), ONE_GROUP, BF, symmetric=True), 4),
            (
                GemmCase(
                    (140, 264, 800), ONE_GROUP, BF, bits=8, grids=F32, symmetric=True, biased=True
                ),
                1,
            ),
            (GemmCase((70, 144, 1056), 32, HF, bits=8, gated=True), 1),
            (GemmCase((129, 72, 2080), 64, BF, bits=8), 4),
            (GemmCase((17, 136, 1056), 128, BF, bits=8, biased=True), 1),
            (GemmCase((64, 400, 2080), 32, BF, bits=8, gated=True, symmetric=True), 1),
            (GemmCase((40, 264, 2144), 64, HF, bits=8), 2),
            (
                GemmCase(
                    (64, 8, 3104), ONE_GROUP, BF, bits=8, grids=F32, symmetric=True, biased=True
                ),
                4,
            ),
            (GemmCase((31, 192, 2048), 256, BF, bits=8, gated=True), 4),
            (GemmCase((12, 64, 2080), 32, HF, bits=8), 4),
        ),
    ],
)
def test_products(emulator: Emulator, case: GemmCase, split_k: int) -> None:
    assert error(emulator, case, split_k) < ROUNDING_LIMIT[case.dtype]
    assert [name for name, _ in emulator.launched] == ["wq_permute_and_sum", "wq_gemm_pipelined"]


WAIT_FOR_EMPTY = "mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);\n"
LAST_SYNC = "read its shared memory\n    if (SPLIT > 1) cluster_sync_relaxed();"
MISTAKES = {
    "pieces not waited for": ("mbarrier_wait(full(), state.parity);\n        a.load(", "a.load("),
    "stages filled too early": (f"{WAIT_FOR_EMPTY}load_w(", "load_w("),
    "products not waited for": "        wgmma_wait<PENDING>();\n",
    "products of the group before not waited for": ("HAS_NEXT ? 1 : 0 > (", "HAS_NEXT ? 2 : 0 > ("),
    "sums in the registers of the group before": (
        "part[NEXT % IN_FLIGHT], NEXT",
        "part[UNIT % 2], NEXT",
    ),
    "a stage given back while its products run": ("release(stage);\n", "release(state.stage);\n"),
    "blocks do not meet": ("    if (SPLIT > 1)\n        cluster_sync();\n    else if", "    if"),
    "both consumers wait for their turn": "if (threadIdx.x >= 128) give_turn();",
    "the first rows of x in every block": ("w.m_tiles) * BLOCK_M,", "w.m_tiles) * 0,"),
    "the kernel in front not waited for": (
        "pdl_wait();\n        for (int i = 0; i < ahead",
        "for (int i = 0; i < ahead",
    ),
    "a block ends early": (LAST_SYNC, "read its shared memory"),
    "the raise kept": (" - CODE_BASE * scale;", ";"),
    "the last columns forgotten": ("column < w.columns) four", "column < w.columns - 4) four"),
}


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    large = any(word in change[0] for word in ("give_turn", "BLOCK_M"))
    size, split_k = ((150, 264, 2080), 1) if large else ((20, 72, 2080), 2)
    case = GemmCase(size, 256, BF)
    assert emulator.detects(change, lambda: error(emulator, case, split_k) < ROUNDING_LIMIT[BF])
