"""wq_gemm_large_m.cu: plans of launches, compilation, and every form on a GPU."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops.cuda.weight_only_gemm import wq_gemm_large_m
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_large_m import LargeMConfig, PlannedLaunch
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_tile import (
    WeightTileRange,
    WqSpec,
    count_weight_tiles,
)
from modelmill.ops.groupwise import GroupwiseLinearInputs
from tests.ops.nvcc import compiles_without_spills, requires_cuda_kernels, requires_nvcc
from tests.ops.random_codes import random_codes
from tests.ops.wq_gemm_check import check_wq_gemm


def _spec(bits: int, columns: int, group: int, *, offset: bool, wide: bool = False) -> WqSpec:
    return WqSpec(bits, columns, group, offset, wide, wq_gemm_large_m.K_TILE)


@given(
    tokens=st.integers(129, 4096),
    eights=st.integers(1, 4000),
    runs=st.integers(1, 800),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128, 256, 512, 1 << 20]),
    offset=st.booleans(),
    num_sms=st.sampled_from([78, 114, 132]),
)
def test_a_plan_covers_the_weight_once(
    tokens: int, eights: int, runs: int, bits: int, group: int, offset: bool, num_sms: int
) -> None:
    rows, spec = 8 * eights, _spec(bits, 32 * runs, group, offset=offset)
    plan = wq_gemm_large_m.fastest_plan(tokens, rows, spec, num_sms)
    covered = [
        number
        for each in plan
        for number in range(each.tiles.first, each.tiles.first + each.tiles.number)
    ]
    assert not plan or covered == list(range(count_weight_tiles(rows)))
    for config, _ in plan:
        memory = wq_gemm_large_m.plan_block_smem(spec, config)
        assert memory.shared_bytes <= 227 << 10
        assert 3 <= memory.num_stages <= 8


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_128_of_large_models_are_served(bits: int) -> None:
    for columns in (896, 4096, 8192, 14336, 28672):
        spec = _spec(bits, columns, 128, offset=True)
        assert wq_gemm_large_m.fastest_plan(512, 4096, spec, 132), columns


def test_warm_up_meets_every_plan() -> None:
    def configs(tokens: int, spec: WqSpec) -> set[LargeMConfig]:
        plan = wq_gemm_large_m.fastest_plan(tokens, 4608, spec, 132)
        return {each.config for each in plan}

    for most, columns in itertools.product((129, 200, 700, 1024, 5000), (3584, 14336)):
        spec = _spec(4, columns, 128, offset=True)
        rows = wq_gemm_large_m.warmup_sizes(4, most)
        met = set().union(*(configs(tokens, spec) for tokens in rows))
        assert met >= set().union(*(configs(n, spec) for n in range(129, min(most, 2048) + 1)))


@requires_nvcc
@pytest.mark.parametrize("block_m", wq_gemm_large_m.BLOCK_M)
@pytest.mark.parametrize("split_k", [1, 3], ids=str)
def test_compiles_without_spills(block_m: int, split_k: int, tmp_path: Path) -> None:
    specs = [
        _spec(4, 2816, 128, offset=True),
        _spec(4, 2816, 128, offset=False),
        _spec(8, 2816, 128, offset=True),
        _spec(8, 2048, 32, offset=True),
        _spec(4, 2048, 32, offset=True),
        _spec(8, 2816, 2816, offset=False, wide=True),
    ]
    pairs = list(itertools.product((torch.bfloat16, torch.float16), (True, False)))
    for spec, (dtype, gated) in zip(specs, 2 * pairs):
        config = LargeMConfig(block_m, split_k)
        assert wq_gemm_large_m.fits_shared_memory(spec, config)
        macros = wq_gemm_large_m.kernel_macros(dtype, spec, config, gated=gated)
        # split-K's end in float16 puts a word away, behind the loop
        most = 8 if dtype is torch.float16 and split_k > 2 else 0
        compiles_without_spills("wq_gemm_large_m.cu", macros, tmp_path / "out", most)


@pytest.mark.gpu
@requires_cuda_kernels
@pytest.mark.parametrize("config", itertools.product(wq_gemm_large_m.BLOCK_M, (1, 2, 3, 4)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_form(config: tuple[int, int], dtype: torch.dtype, bits: int) -> None:
    cases = [
        (70, 136, 2048, 128),
        (513, 4096, 4096, 256),
        (300, 1040, 11008, 128),
        (260, 400, 2080, 32),
        (1000, 2064, 4160, 64),
        (129, 16, 4128, 1 << 20),
    ]
    for (tokens, rows, columns, group), gated in itertools.product(cases, (False, True)):
        if gated and rows % 16:
            continue
        offset = not gated or tokens == 300
        spec = _spec(bits, columns, group, offset=offset)
        if not wq_gemm_large_m.fits_shared_memory(spec, LargeMConfig(*config)):
            continue
        args = random_codes(bits, rows, columns, group, offset=offset, seed=tokens)
        bias = torch.randn(rows, device="cuda", dtype=dtype) if tokens in (70, 1000) else None
        x = torch.randn(tokens, columns + 64, device="cuda", dtype=dtype)[:, :columns]
        if not gated:
            x += 0.5  # an error that all weights of a row share does not cancel
        x[:, 7] *= 30
        inputs = GroupwiseLinearInputs(x, *args, bias)
        tiles = count_weight_tiles(rows)
        first = max(tiles // 2, 1)
        halves = (WeightTileRange(0, first), WeightTileRange(first, tiles - first))
        plan = tuple(PlannedLaunch(LargeMConfig(*config), half) for half in halves if half.number)
        multiply = functools.partial(wq_gemm_large_m.wq_gemm, plan=plan)
        check_wq_gemm(multiply, inputs, bits, gated=gated)
