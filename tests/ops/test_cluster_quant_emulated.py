"""cluster_quant.cu on a CPU, as its own Python launches it, against the reference."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from modelmill.ops.case import Case
from modelmill.ops.cluster_quant import cases_of
from modelmill.ops.cluster_quant import cluster_quant as reference
from modelmill.ops.cuda import cluster_quant
from tests.ops.emulation.emulated import Emulator, needed
from tests.ops.nvcc import compiles_without_spills
from tests.ops.nvcc import needed as nvcc_needed

slow = pytest.mark.slow
BF, HF = torch.bfloat16, torch.float16


def made(size: tuple[int, int, int], dtype: torch.dtype) -> list[Case]:
    """Gated and not, static and dynamic, 8 bits and 4."""
    behind = itertools.islice(cases_of([(1, 32, 32), size], "cpu", dtype), 4, None)  # whose gate differs
    return [*behind, *cases_of([size], "cpu", dtype, full=True)]


def off(emulator: Emulator, case: Case) -> int:
    """By how many steps the worst value is beside the reference. Fails where a step is off by a hundredth."""
    args = dict(case.args)
    x = args["x"]
    emulator.front = lambda name, arguments: [(x.data_ptr(), x.nbytes)]
    q, step = cluster_quant.run(**args)
    # the gate is rounded where the reference rounds, in x's dtype
    right, steps = reference(**args)
    if steps is not None:
        assert step is not None
        torch.testing.assert_close(step, steps, rtol=0.01, atol=0)
    return int((q.int() - right.int()).abs().max())


@needed
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((6, 76, 32), BF),
        ((5, 612, 256), HF),
        pytest.param((9, 260, 64), BF, marks=slow),
        pytest.param((4, 2100, 128), HF, marks=slow),
    ],
)
def test_clustered_integers(emulator: Emulator, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    for case in made(size, dtype):
        assert off(emulator, case) <= 1, case.name


MET = ("    __syncthreads();\n    if (!OWN)", "    if (!OWN)")
LARGEST = ("most = fmaxf(most, __shfl_xor_sync(~0u, most, by));", "most = most;")


@needed
@slow
@pytest.mark.parametrize("change", [MET, LARGEST], ids=["columns not waited for", "each thread by itself"])
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    def right() -> bool:
        try:
            return off(emulator, made((6, 612, 128), BF)[1]) <= 1
        except AssertionError:
            return False

    assert emulator.sees(change, right)


@nvcc_needed
@pytest.mark.parametrize("group", [32, 128])
def test_compiles_without_spills(group: int, tmp_path: Path) -> None:
    for dtype, gated, own in ((BF, True, True), (HF, False, False), (BF, True, False)):
        macros = cluster_quant.macros_of(dtype, group, gated=gated, own=own, shifted=not own)
        compiles_without_spills("cluster_quant.cu", macros, tmp_path / "out")
