"""wq_gemm_small_m.cu: configs, compilation, and its forms on a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops.cuda.weight_only_gemm import wq_gemm_small_m
from modelmill.ops.cuda.weight_only_gemm.wq_gemm_small_m import SmallMSpec
from modelmill.ops.groupwise import GroupwiseLinearInputs, make_groupwise_problem
from tests.ops.nvcc import compiles_without_spills, requires_cuda_kernels, requires_nvcc
from tests.ops.random_codes import random_codes
from tests.ops.wq_gemm_check import check_wq_gemm

SM_COUNT = 132


def _columns(spec: SmallMSpec, lines: int) -> int:
    return lines * 8 * wq_gemm_small_m.LINE_BYTES // spec.bits


@given(
    bits=st.sampled_from([4, 8]),
    part=st.sampled_from([32, 64, 128]),
    m_tiles=st.sampled_from([1, 2]),
    lines=st.integers(1, 240),
    tiles=st.integers(1, 9000),
    num_sms=st.sampled_from([7, 78, 114, 132]),
)
def test_a_config_covers_the_weight(
    bits: int, part: int, m_tiles: int, lines: int, tiles: int, num_sms: int
) -> None:
    spec = SmallMSpec(bits, min(part, 512 // bits), m_tiles, offset=True, float32_scales=False)
    groups = _columns(spec, lines) // part
    config = wq_gemm_small_m.config_for(spec, _columns(spec, lines), groups, tiles, num_sms)
    if config is None:
        assert groups > 128 or tiles > 7 * num_sms  # scales or sums beyond shared memory
        return
    block_lines = -(-lines // config.split_k)
    assert config.passes * config.lines_per_warp * config.warps >= block_lines
    assert config.lines_per_warp <= spec.max_lines_per_warp
    assert 2 <= config.stages <= 8
    assert wq_gemm_small_m.shared_bytes(spec, config) <= 227 << 10
    assert config.clusters * config.max_tiles_per_cluster >= tiles
    assert config.clusters == 1 or config.clusters * config.split_k <= num_sms


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_128_of_large_models_are_served(bits: int) -> None:
    for columns, m_tiles in itertools.product((3584, 4096, 14336, 28672), (1, 2)):
        spec = SmallMSpec(bits, 512 // bits, m_tiles, offset=True, float32_scales=False)
        config = wq_gemm_small_m.config_for(spec, columns, columns // 128, 256, SM_COUNT)
        assert config is not None


@requires_nvcc
@pytest.mark.parametrize("m_tiles", [1, 2])
@pytest.mark.parametrize("columns", [4096, 14336, 28672])
def test_compiles_without_spills(columns: int, m_tiles: int, tmp_path: Path) -> None:
    specs = [
        (SmallMSpec(4, 128, m_tiles, offset=True, float32_scales=False), 128),
        (SmallMSpec(4, 64, m_tiles, offset=False, float32_scales=False), 64),
        (SmallMSpec(8, 64, m_tiles, offset=False, float32_scales=True), columns),
        (SmallMSpec(8, 64, m_tiles, offset=True, float32_scales=False), 128),
        (SmallMSpec(4, 32, m_tiles, offset=True, float32_scales=False), 32),
    ]
    pairs = [*itertools.product((torch.bfloat16, torch.float16), (True, False))]
    for (spec, group), (dtype, gated) in zip(specs, [*pairs, pairs[0]], strict=True):
        groups = max(columns // group, 1)
        config = wq_gemm_small_m.config_for(spec, columns, groups, 256, SM_COUNT)
        if config is None:
            assert group == 32  # its scales find no room
            continue
        shift = 30 if group == columns else max(group // spec.part_columns, 1).bit_length() - 1
        macros = wq_gemm_small_m.kernel_macros(dtype, spec, config, shift, gated=gated)
        # with two lines of a warp, words of the columns' sums; else one or two
        most = 256 if spec.part_columns == 32 else 128 if columns == 28672 else 8
        compiles_without_spills("wq_gemm_small_m.cu", macros, tmp_path / "out", most)


@pytest.mark.gpu
@requires_cuda_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        (6144, 4096, 128),
        (4096, 14336, 128),
        (4608, 3584, 64),
        (2048, 11008, 32),
        (32, 1024, 256),
        (28672, 4096, 1 << 20),
        (1024, 28672, 128),
    ],
)
def test_every_form(rows: int, columns: int, group: int, bits: int, dtype: torch.dtype) -> None:
    for tokens, gated in itertools.product((2, 5, 8, 9, 16), (False, True)):
        offset = not gated or tokens == 5
        args = random_codes(bits, rows, columns, min(group, columns), offset=offset, seed=tokens)
        bias = torch.randn(rows, device="cuda", dtype=dtype) if tokens in (5, 16) else None
        x = torch.randn(tokens, columns + 64, device="cuda", dtype=dtype)[:, :columns]
        if not gated:
            x += 0.5  # an error that all weights of a row share does not cancel
        inputs = GroupwiseLinearInputs(x, *args, bias)
        if wq_gemm_small_m.problem_config(make_groupwise_problem(*inputs)) is None:
            assert group == 32  # its scales find no room
            continue
        check_wq_gemm(wq_gemm_small_m.groupwise_gemm, inputs, bits, gated=gated, repeats=3)
