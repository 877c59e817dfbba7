"""gemm_swiglu_large_m.cu on a CPU, launched by its own Python, against float64: two blocks that
bring each other weights, tiles over the edges, more tiles than pairs of blocks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from modelmill.ops.cuda.gemm_16bit import gemm
from tests.ops.emulation.cases import mistakes
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation
from tests.ops.matmul_error import ROUNDING_LIMIT, matmul_error

slow = pytest.mark.slow
pytestmark = requires_emulation
BF, HF = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """size: tokens, columns of x, of the output. wide: rows of the weight of a tile."""

    size: tuple[int, int, int]
    wide: int = 256
    dtype: torch.dtype = BF
    biased: bool = False
    multiprocessors: int = 2


def error(emulator: Emulator, case: Case) -> float:
    tokens, columns, width = case.size
    emulator.num_sms = case.multiprocessors
    generator = torch.Generator().manual_seed(width)
    x = torch.full((tokens, columns + 24), float("nan")).to(case.dtype)[:, :columns]
    x[:] = torch.randn(tokens, columns, generator=generator)
    weight = (torch.randn(2 * width, columns, generator=generator) / 8).to(case.dtype)
    bias = torch.randn(2 * width, generator=generator).to(case.dtype) if case.biased else None
    out = torch.empty(tokens, width, dtype=case.dtype)
    emulator.preceding_writes = lambda *_: [
        (x.data_ptr(), x.untyped_storage().nbytes()),
        *memory_ranges(out),
    ]
    gemm.gemm_swiglu_large_m(x, weight, bias, out, case.wide)
    return matmul_error(out, x, weight, bias, gated=True)


@pytest.mark.parametrize(
    "case",
    [
        Case((300, 192, 264)),
        Case((130, 136, 232), 224, HF, biased=True),
        pytest.param(Case((256, 640, 256), 256, HF, biased=True), marks=slow),
        pytest.param(Case((260, 640, 224), 224), marks=slow),
        pytest.param(Case((1, 64, 8)), marks=slow),
        pytest.param(Case((1, 64, 8), 224), marks=slow),
        pytest.param(Case((1030, 72, 520), multiprocessors=5), marks=slow),
        pytest.param(Case((513, 1096, 456), 224, multiprocessors=5), marks=slow),
    ],
    ids=str,
)
def test_products(emulator: Emulator, case: Case) -> None:
    assert error(emulator, case) < ROUNDING_LIMIT[case.dtype]
    assert [name for name, _ in emulator.launched] == ["gemm_swiglu_large_m"]


MISTAKES = {
    "slabs not waited for": "mbarrier_wait(shared_address(&barriers.full[at.stage]), at.parity);\n",
    "stages filled too early": (
        "mbarrier_wait(shared_address(&barriers.empty[at.stage]), at.parity ^ 1);\n"
    ),
    "the other block is not told": (
        "lane < CLUSTER) mbarrier_arrive_cluster(shared_address(&barriers.empty[last]), lane)",
        "lane < CLUSTER) mbarrier_arrive_cluster(shared_address(&barriers.empty[last]), cluster_rank())",  # noqa: E501
    ),
    "stages given back too early": "        wgmma_wait<1>(); // those of the previous K tile\n",
    "products not waited for": (
        "wgmma_wait<0>(); wgmma_fence_operand(d); release", "wgmma_fence_operand(d); release",
    ),
    "a store's place used too early": "if (SLICE == 0) staging.acquire();",
    "stores not waited for": "        if (staging.thread == 0) tma_store_wait();\n",
    "both halves in one place": (" + rank * W_HALF, w_map", ", w_map"),
    "a half brought to one block": ("w_row, 3);", "w_row, 1 << rank);"),
    "the last columns forgotten": (
        "i * STORE_BOX < n) tma_store", "i * STORE_BOX + STORE_BOX < n) tma_store",
    ),
    "rows of x that are not there yet": (
        "    pdl_wait();\n    for (int k_tile", "    for (int k_tile",
    ),
    "barriers of a block that has not made them": ("    cluster_sync_relaxed();\n}\n", "}\n"),
}  # fmt: skip


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    assert emulator.detects(
        change, lambda: error(emulator, Case((300, 448, 200))) < ROUNDING_LIMIT[BF]
    )
