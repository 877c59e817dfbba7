"""int8_gemm_small_m.cu on a CPU, as its own Python launches it, against float64."""

from __future__ import annotations

import pytest
import torch

from modelmill.ops.cuda.weight_only_gemm import int8_gemm_small_m, wq_gemv
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from modelmill.ops.int8_group_linear import dequantize_weight, random_weight
from tests.ops.emulation.emulator import Emulator, requires_emulation
from tests.ops.matmul_error import matmul_error

slow = pytest.mark.slow
pytestmark = requires_emulation
BF, HF, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {BF: 3e-3, HF: 5e-4}  # of the whole, in the norm: the output's own rounding
ALL = 1 << 20  # one group


def _serves_gemv(inputs: GroupwiseLinearInputs) -> bool:
    kernel = wq_gemv.gemv_kernel(gated=False)
    assert kernel.supports is not None
    return kernel.range.covers(make_groupwise_problem(*inputs)) and kernel.supports(inputs)


def error(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    grids: torch.dtype,
    **switches: bool,
) -> float:
    """size: tokens, rows and columns of the weight. switches: gated, symmetric, biased."""
    tokens, rows, columns = size
    gated, symmetric, biased = (
        switches.get(name, False) for name in ("gated", "symmetric", "biased")
    )
    generator = torch.Generator().manual_seed(rows)
    tensors = random_weight(rows, columns, min(group, columns), device="cpu", symmetric=symmetric)
    weight, scale, offset = tensors["weight"], tensors["scale"], tensors["offset"]
    assert weight is not None
    assert scale is not None
    x = torch.full((tokens, columns + 24), float("nan")).to(dtype)[:, :columns]
    x[:] = torch.randn(tokens, columns, generator=generator)
    x[:, ::37] *= 30
    bias = torch.randn(rows, generator=generator).to(dtype) if biased else None
    emulator.preceding_writes = lambda name, arguments: [
        (x.data_ptr(), tokens * x.stride(0) * x.element_size())
    ]
    stored = (weight, scale.to(grids), None if offset is None else offset.to(grids), group)
    inputs = GroupwiseLinearInputs(x, *stored, bias)
    kernel = wq_gemv.groupwise_gemv if _serves_gemv(inputs) else int8_gemm_small_m.int8_mma_gemm
    actual = kernel(inputs, gated=gated)
    dense = dequantize_weight(weight, scale, offset, min(group, columns), columns, torch.float64)
    return matmul_error(actual, x, dense, bias, gated=gated)


@pytest.mark.parametrize(
    ("size", "group", "dtype", "grids", "switches"),
    [
        ((1, 33, 160), 32, BF, HF, {"symmetric": True, "biased": True}),
        pytest.param((8, 56, 672), 64, HF, HF, {"biased": True}, marks=slow),
        ((3, 40, 1056), ALL, BF, F32, {"symmetric": True, "gated": True}),
        pytest.param((5, 72, 2144), 128, BF, HF, {}, marks=slow),
        pytest.param((12, 40, 544), 32, BF, F32, {"biased": True}, marks=slow),
        pytest.param((30, 66, 832), 64, BF, HF, {"symmetric": True, "gated": True}, marks=slow),
        pytest.param((64, 130, 1120), 256, HF, HF, {"biased": True}, marks=slow),
        pytest.param((50, 48, 96), 32, BF, HF, {"gated": True}, marks=slow),
    ],
)
def test_products(
    emulator: Emulator,
    size: tuple[int, int, int],
    group: int,
    dtype: torch.dtype,
    grids: torch.dtype,
    switches: dict[str, bool],
) -> None:
    assert error(emulator, size, group, dtype, grids, **switches) < LIMIT[dtype]
    assert [name for name, _ in emulator.launched] == ["int8_gemm_small_m"]


INSIDE = (
    "return K_TILE == 32 || at.column + K_TILE * k_tile + 64 * load < w.row_length;",
    "return true;",
)
SUMS = ("if (OFFSET) total[n][c] += first.y * sums[n][c],", "if (OFFSET)")
FRONT = ("    pdl_enter(w.tokens);\n", "")


@slow
@pytest.mark.parametrize(
    "change", [INSIDE, SUMS, FRONT], ids=["past a row's end", "sums of x", "x not waited for"]
)
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    assert emulator.detects(change, lambda: error(emulator, (3, 40, 1056), 128, BF, HF) < LIMIT[BF])
