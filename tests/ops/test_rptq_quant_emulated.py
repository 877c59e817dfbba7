"""rptq_quant.cu on a CPU, as its own Python launches it, against the reference."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from modelmill.ops.case import Case
from modelmill.ops.cuda.norm_quantize import rptq_quant
from modelmill.ops.rptq_quant import RptqQuantInputs, cases_for_shapes
from modelmill.ops.rptq_quant import rptq_quant as reference
from tests.ops.emulation.emulator import Emulator, requires_emulation
from tests.ops.nvcc import compiles_without_spills
from tests.ops.nvcc import requires_nvcc as nvcc_needed

slow = pytest.mark.slow
BF, HF = torch.bfloat16, torch.float16


def make_cases(size: tuple[int, int, int], dtype: torch.dtype) -> list[Case]:
    """Gated and not, static with and without fallback and dynamic, 8 bits and 4."""
    # whose gate differs
    behind = itertools.islice(cases_for_shapes([(1, 32, 32), size], "cpu", dtype), 6, None)
    return [*behind, *cases_for_shapes([size], "cpu", dtype, full=True)]


def case_error(emulator: Emulator, case: Case) -> int:
    """By how many steps the worst value is beside the reference.

    Fails where a step is off by a hundredth.
    """
    args = dict(case.args)
    x = args["x"]
    emulator.preceding_writes = lambda name, arguments: [(x.data_ptr(), x.nbytes)]
    q, step = rptq_quant.run(RptqQuantInputs(**args))
    # the gate is rounded where the reference rounds, in x's dtype
    expected, steps = reference(RptqQuantInputs(**args))
    if steps is not None:
        assert step is not None
        torch.testing.assert_close(step, steps, rtol=0.01, atol=0)
    return int((q.int() - expected.int()).abs().max())


@requires_emulation
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ((6, 76, 32), BF),
        ((5, 612, 256), HF),
        pytest.param((9, 260, 64), BF, marks=slow),
        pytest.param((4, 2100, 128), HF, marks=slow),
    ],
)
def test_clustered_integers(
    emulator: Emulator, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    for case in make_cases(size, dtype):
        assert case_error(emulator, case) <= 1, case.name


MET = ("    __syncthreads();\n    if (!DYNAMIC)", "    if (!DYNAMIC)")
LARGEST = ("most = fmaxf(most, __shfl_xor_sync(~0u, most, by));", "most = most;")


@requires_emulation
@slow
@pytest.mark.parametrize(
    "change", [MET, LARGEST], ids=["columns not waited for", "each thread by itself"]
)
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    def is_exact() -> bool:
        try:
            return case_error(emulator, make_cases((6, 612, 128), BF)[1]) <= 1
        except AssertionError:
            return False

    assert emulator.detects(change, is_exact)


@nvcc_needed
@pytest.mark.parametrize("group", [32, 128])
def test_compiles_without_spills(group: int, tmp_path: Path) -> None:
    configs = ((BF, True, True), (HF, False, False), (BF, True, False))
    for (dtype, gated, own), fallback in itertools.product(configs, (False, True)):
        macros = rptq_quant.kernel_macros(
            dtype,
            group,
            gated=gated,
            dynamic=own or fallback,
            has_zero_point=fallback or not own,
            fallback=fallback,
        )
        compiles_without_spills("rptq_quant.cu", macros, tmp_path / "out")
