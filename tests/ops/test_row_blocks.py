"""Weight-only GEMMs of 65 to 192 rows, which kernels of up to 64 multiply in blocks; and whether
what an implementation offers is served by one of its kernels.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.weight_only_gemm import (
    int4_linear,
    int4_linear_swiglu,
    int8_gemm_small_m,
    int8_group_linear,
    int8_linear,
    int8_linear_swiglu,
    wq_gemm_pipelined,
)
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    MAX_ROWS,
    ROW_BLOCK_KERNEL_MAX_ROWS,
    row_block_kernel,
)
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_tile import WqSpec
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.int4_linear import int4_linear as reference
from modelmill.ops.int4_linear import random_weight
from modelmill.ops.kernel_support import GemmProblem, GemmSupportRange, Kernel, select_first_kernel

N, K, GROUP = 48, 128, 32


def operands(rows: int, dtype: torch.dtype = torch.float32) -> GroupwiseLinearInputs:
    weight = random_weight(N, K, GROUP, device="cpu", symmetric=False)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)
    assert weight["weight"] is not None
    assert weight["scale"] is not None
    return GroupwiseLinearInputs(
        x, weight["weight"], weight["scale"], weight["offset"], GROUP, torch.arange(N).to(dtype)
    )


@pytest.mark.parametrize("rows", [65, 127, 128, 129, 192])
def test_blocks_are_the_product(rows: int) -> None:
    calls: list[tuple[str, int]] = []

    def kernel(name: str, least: int, most: int) -> Kernel:
        def run(inputs: GroupwiseLinearInputs) -> torch.Tensor:
            calls.append((name, len(inputs.x)))
            return reference(inputs)

        return Kernel(GemmSupportRange(m=(least, most)), run)

    blocks = row_block_kernel([kernel("one", 1, 1), kernel("few", 1, MAX_ROWS)])
    inputs = operands(rows)
    assert blocks.range.covers(make_groupwise_problem(*inputs))
    torch.testing.assert_close(blocks.run(inputs), reference(inputs), rtol=1e-6, atol=1e-5)
    assert sum(size for _, size in calls) == rows
    assert max(size for _, size in calls) <= MAX_ROWS
    assert ("one", 1) in calls or rows % MAX_ROWS != 1, "a single row takes its own kernel"


@pytest.mark.parametrize(
    "rows", [MAX_ROWS, MAX_ROWS + 1, ROW_BLOCK_KERNEL_MAX_ROWS, ROW_BLOCK_KERNEL_MAX_ROWS + 1]
)
@pytest.mark.parametrize("module", [int4_linear, int8_gemm_small_m])
def test_ranges_and_kernels_end_at_the_same_rows(module: object, rows: int) -> None:
    """Without a GPU, whose kernels of more rows serve such a weight."""
    inputs = operands(rows, torch.bfloat16)
    problem = make_groupwise_problem(*inputs)
    if module is int8_gemm_small_m:
        problem = problem._replace(weight_dtype=torch.int8)
    ranges = module.SUPPORTED_PROBLEMS  # type: ignore[attr-defined]
    kernels = module.list_kernels_by_preference(gated=False)  # type: ignore[attr-defined]
    served = any(each.covers(problem) for each in ranges)
    assert served == (rows <= ROW_BLOCK_KERNEL_MAX_ROWS)
    assert (select_first_kernel(kernels, problem, inputs) is not None) == served


def test_a_weight_that_few_rows_cannot_take_is_not_taken_in_blocks() -> None:
    problem = make_groupwise_problem(*operands(100, torch.bfloat16))._replace(k=K + 8)
    assert not any(each.covers(problem) for each in int4_linear.SUPPORTED_PROBLEMS)
    assert not any(each.covers(problem) for each in int8_linear.SUPPORTED_PROBLEMS)


IMPLEMENTATIONS = [int4_linear, int4_linear_swiglu, int8_group_linear, int8_linear_swiglu]


@given(
    module=st.sampled_from(IMPLEMENTATIONS),
    rows=st.integers(1, 1100),
    n=st.integers(1, 600).map(lambda eights: 8 * eights),
    runs=st.integers(1, 1700),
    group=st.sampled_from([32, 64, 96, 128, 256, 384, 1 << 20]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    scale_dtype=st.sampled_from([torch.float16, torch.float32]),
    offset=st.booleans(),
)
def test_what_is_offered_is_served(
    module: ModuleType, rows: int, n: int, runs: int, group: int, dtype: torch.dtype,
    scale_dtype: torch.dtype, offset: bool,
) -> None:  # fmt: skip
    """A kernel is launched with no more shared memory than there is, a gated one too."""
    k, bits = 32 * runs, 4 if "int4" in module.__name__ else 8
    group = min(group, k)
    problem = GemmProblem(
        rows, n, k, dtype, torch.uint8 if bits == 4 else torch.int8, dtype, group, -(-k // group),
        scale_dtype, offset, False, 0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "sm_count", lambda device: 132)
        offered = any(each.covers(problem) for each in module.SUPPORTED_PROBLEMS)
        chosen = next((each for each in module.KERNELS if each.range.covers(problem)), None)
        assert chosen is not None or not offered, problem


@pytest.mark.parametrize(
    ("n", "k", "group"), [(4608, 3584, 128), (2560, 4096, 64), (4096, 14336, 32)]
)
@pytest.mark.parametrize(("bits", "num_sms"), [(4, 132), (8, 132), (4, 114), (8, 78)])
def test_warm_up_meets_every_form(n: int, k: int, group: int, bits: int, num_sms: int) -> None:
    spec = WqSpec(bits, k, group, offset=True)
    weight = torch.empty((n, 0), dtype=torch.uint8 if bits == 4 else torch.int8, device="meta")
    x = torch.empty((1, k), dtype=torch.bfloat16, device="meta")

    def specialization(rows: int) -> tuple[int, int | None]:
        padded = wq_gemm_pipelined.block_rows(rows)
        return padded, wq_gemm_pipelined.best_split_k(n, spec, padded, num_sms)

    for most in (1, 40, 64, 100, 200, 700, 1024, 5000):
        met = {specialization(rows) for rows in wq_gemm_pipelined.warmup_sizes(x, weight, most)}
        assert met >= {
            specialization(rows)
            for rows in range(1, min(most, wq_gemm_pipelined.MAX_BLOCK_ROWS) + 1)
        }
