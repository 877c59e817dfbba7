"""wq_gemm_pipelined.cu on a CPU, both kernels as their own Python launches them, against
float64.
"""

from __future__ import annotations

import struct
from types import ModuleType

import pytest
import torch

from modelmill.ops import int4_linear, int8_group_linear
from modelmill.ops.cuda.weight_only_gemm import wq_gemm_pipelined
from modelmill.ops.groupwise import make_groupwise_problem
from tests.ops.emulation.emulator import Emulator, mistakes, requires_emulation, slow_cases
from tests.ops.groupwise_operands import random_operands
from tests.ops.matmul_error import matmul_error

pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF: 3e-3, HF: 5e-4}  # of the whole, in the norm: the output's own rounding
ALL = 1 << 20  # one group
GATED_SYMMETRIC = {"gated": True, "symmetric": True}
SYMMETRIC_BIASED = {"symmetric": True, "biased": True}


def in_front(name: str, arguments: tuple[bytes, ...]) -> list[tuple[int, int]]:
    """x of the products, as its map says; wq_permute_and_sum has nothing in front that is ours to
    spoil.
    """
    if name == "wq_permute_and_sum":
        return []
    address, _, _, _, rows, _, _, stride = struct.unpack_from("=8Q", arguments[0])
    return [(address, rows * stride)]


def error(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    split_k: int,
    of: ModuleType = int4_linear,
    grids: torch.dtype = HF,
    **switches: bool,
) -> float:
    """size: tokens, rows and columns of the weight. of: its op. grids: type of its scales.
    switches: gated, symmetric, biased."""
    rows, gated = size[1], switches.get("gated", False)
    inputs, dense = random_operands(size, group, dtype, of, grids, switches)
    emulator.preceding_writes = in_front
    spec = wq_gemm_pipelined.problem_spec(make_groupwise_problem(*inputs))
    assert wq_gemm_pipelined.supports_weight(rows, spec, gated=gated)
    assert wq_gemm_pipelined.fits_shared_memory(
        split_k, spec, wq_gemm_pipelined.block_rows(size[0])
    )
    actual = wq_gemm_pipelined.wq_gemm(inputs, split_k, gated=gated)
    return matmul_error(actual, inputs.x, dense, inputs.bias, gated=gated)


@pytest.mark.parametrize(
    ("size", "group", "dtype", "split_k", "switches"),
    [
        ((9, 136, 672), 128, BF, 1, {"biased": True}),
        ((33, 144, 544), ALL, HF, 1, GATED_SYMMETRIC),
        ((10, 72, 1056), 256, BF, 2, {}),
        ((150, 136, 672), 128, BF, 1, {"biased": True}),
        ((11, 72, 672), 32, BF, 1, {"biased": True}),
        ((34, 144, 1056), 64, HF, 2, GATED_SYMMETRIC),
        ((16, 136, 1568), 64, BF, 3, {}),
        *slow_cases(
            ((20, 208, 2144), 64, BF, 4, {"gated": True}),
            ((64, 264, 2080), 256, HF, 2, {}),
            ((130, 520, 1568), 128, BF, 3, SYMMETRIC_BIASED),
            ((64, 72, 4128), 32, HF, 4, {"symmetric": True}),
            ((140, 264, 800), 32, BF, 1, {}),
            ((131, 304, 2080), ALL, HF, 1, GATED_SYMMETRIC),
            ((260, 264, 1056), 256, BF, 2, {"gated": False}),
            ((65, 128, 2144), 128, HF, 4, {"gated": True, "biased": True}),
            ((64, 400, 2080), 128, BF, 1, {"gated": True, "biased": True}),
            ((40, 264, 2144), 512, HF, 2, {}),
            ((9, 128, 4128), 128, HF, 2, {"gated": True}),
            ((64, 8, 3104), ALL, BF, 4, {"symmetric": True}),
        ),
    ],
)
def test_products(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    split_k: int,
    switches: dict[str, bool],
) -> None:
    assert error(emulator, size, group, dtype, split_k, **switches) < LIMIT[dtype]
    assert [name for name, _ in emulator.launched] == ["wq_permute_and_sum", "wq_gemm_pipelined"]


@pytest.mark.parametrize(
    ("size", "group", "dtype", "split_k", "grids", "switches"),
    [
        ((9, 72, 544), 32, BF, 1, HF, {"biased": True}),
        ((33, 144, 672), ALL, HF, 1, F32, GATED_SYMMETRIC),
        ((10, 72, 1056), 64, BF, 2, HF, {"symmetric": True}),
        *slow_cases(
            (
                (140, 264, 800),
                ALL,
                BF,
                1,
                F32,
                SYMMETRIC_BIASED,
            ),
            ((70, 144, 1056), 32, HF, 1, HF, {"gated": True}),
            ((129, 72, 2080), 64, BF, 4, HF, {}),
            ((17, 136, 1056), 128, BF, 1, HF, {"biased": True}),
            ((64, 400, 2080), 32, BF, 1, HF, GATED_SYMMETRIC),
            ((40, 264, 2144), 64, HF, 2, HF, {}),
            ((64, 8, 3104), ALL, BF, 4, F32, SYMMETRIC_BIASED),
            ((31, 192, 2048), 256, BF, 4, HF, {"gated": True}),
            ((12, 64, 2080), 32, HF, 4, HF, {}),
        ),
    ],
)
def test_products_of_eight_bits(
    emulator: Emulator, size: tuple[int, int, int], group: int, dtype: torch.dtype,
    split_k: int, grids: torch.dtype, switches: dict[str, bool],
) -> None:  # fmt: skip
    assert (
        error(emulator, size, group, dtype, split_k, int8_group_linear, grids, **switches)
        < LIMIT[dtype]
    )
    assert [name for name, _ in emulator.launched] == ["wq_permute_and_sum", "wq_gemm_pipelined"]


WAIT_FOR_EMPTY = "mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);\n"
LAST_SYNC = "read its shared memory\n    if (SPLIT > 1) cluster_sync_relaxed();"
MISTAKES = {
    "pieces not waited for": ("mbarrier_wait(full(), state.parity);\n        a.load(", "a.load("),
    "stages filled too early": (f"{WAIT_FOR_EMPTY}load_w(", "load_w("),
    "products not waited for": ("        wgmma_wait<PENDING>();\n", ""),
    "products of the group before not waited for": ("HAS_NEXT ? 1 : 0 > (", "HAS_NEXT ? 2 : 0 > ("),
    "sums in the registers of the group before": (
        "part[NEXT % IN_FLIGHT], NEXT",
        "part[UNIT % 2], NEXT",
    ),
    "a stage given back while its products run": ("release(stage);\n", "release(state.stage);\n"),
    "blocks do not meet": ("    if (SPLIT > 1)\n        cluster_sync();\n    else if", "    if"),
    "both consumers wait for their turn": ("if (threadIdx.x >= 128) give_turn();", ""),
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
    assert emulator.detects(change, lambda: error(emulator, size, 256, BF, split_k) < LIMIT[BF])
