"""Weight-only GEMMs of 65 to 192 rows, which kernels of up to 64 multiply in blocks."""

from __future__ import annotations

import pytest
import torch

from modelmill.ops.cuda.weight_only_gemm import int4_linear, int8_gemm_small_m, int8_linear
from modelmill.ops.cuda.weight_only_gemm.weight_only import (
    MAX_BLOCKED_ROWS,
    MAX_ROWS,
    row_block_kernel,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs, groupwise_problem
from modelmill.ops.int4_linear import int4_linear as reference
from modelmill.ops.int4_linear import random_weight
from modelmill.ops.kernel_range import GemmRange, Kernel, first_kernel

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

        return Kernel(GemmRange(m=(least, most)), run)

    blocks = row_block_kernel([kernel("one", 1, 1), kernel("few", 1, MAX_ROWS)])
    inputs = operands(rows)
    assert blocks.range.covers(groupwise_problem(*inputs))
    torch.testing.assert_close(blocks.run(inputs), reference(inputs), rtol=1e-6, atol=1e-5)
    assert sum(size for _, size in calls) == rows
    assert max(size for _, size in calls) <= MAX_ROWS
    assert ("one", 1) in calls or rows % MAX_ROWS != 1, "a single row takes its own kernel"


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1, MAX_BLOCKED_ROWS, MAX_BLOCKED_ROWS + 1])
@pytest.mark.parametrize("module", [int4_linear, int8_gemm_small_m])
def test_ranges_and_kernels_end_at_the_same_rows(module: object, rows: int) -> None:
    inputs = operands(rows, torch.bfloat16)
    problem = groupwise_problem(*inputs)
    if module is int8_gemm_small_m:
        problem = problem._replace(weight_dtype=torch.int8)
    ranges = module.SUPPORTED_PROBLEMS  # type: ignore[attr-defined]
    kernels = module.kernels(gated=False)  # type: ignore[attr-defined]
    served = any(each.covers(problem) for each in ranges)
    assert served == (rows <= MAX_BLOCKED_ROWS)
    assert (first_kernel(kernels, problem, inputs) is not None) == served


def test_a_weight_that_few_rows_cannot_take_is_not_taken_in_blocks() -> None:
    problem = groupwise_problem(*operands(100, torch.bfloat16))._replace(k=K + 8)
    assert not any(each.covers(problem) for each in int4_linear.SUPPORTED_PROBLEMS)
    assert not any(each.covers(problem) for each in int8_linear.SUPPORTED_PROBLEMS)
