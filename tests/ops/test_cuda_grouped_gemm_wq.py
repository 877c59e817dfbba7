"""The CUDA kernels of experts with quantized weights: what is served, every config, on a GPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.moe import grouped_gemm_wq
from modelmill.ops.moe_support import MoEProblem
from tests.ops.moe_draws import check_moe_on_gpu
from tests.ops.nvcc import compiles_without_spills, requires_cuda_kernels, requires_nvcc

BF = torch.bfloat16
INT4 = (torch.uint8, torch.float16)
MXFP4 = (torch.uint8, torch.uint8)
INT8 = (torch.int8, torch.float32)
QWEN3 = {"top_k": 8, "experts": 128, "global_num_experts": 128, "hidden": 2048, "inner": 768}
PHI_MOE = {"top_k": 2, "experts": 16, "global_num_experts": 16, "hidden": 4096, "inner": 6400}
GPT_OSS = {"top_k": 4, "experts": 32, "global_num_experts": 32, "hidden": 2880, "inner": 2880}


def problem(dtypes: tuple[torch.dtype, torch.dtype], tokens: int, **sizes: Any) -> MoEProblem:
    return MoEProblem(
        m=tokens, dtype=BF, weight_dtype=dtypes[0], scale_dtype=dtypes[1], device=0, **sizes
    )


PROBLEMS = {
    "qwen3 int4": (INT4, {**QWEN3, "group": 128, "offset": True}),
    "qwen3 int4 of 32": (INT4, {**QWEN3, "group": 32}),
    "qwen3 int8": (INT8, QWEN3),
    "gpt-oss": (MXFP4, {**GPT_OSS, "group": 32, "bias": True}),
}


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU there is, or none."""
    monkeypatch.setattr(launch, "sm_count", lambda _: 132)


def ranges(op: str) -> Any:
    return import_module(f"modelmill.ops.cuda.moe.{op}").SUPPORTED_PROBLEMS


@pytest.mark.parametrize(
    ("op", "name", "tokens", "served"),
    [
        ("int4_fused_moe", "qwen3 int4", 3, False),
        ("int4_fused_moe", "qwen3 int4", 4, True),
        ("int4_fused_moe", "qwen3 int4", 512, True),
        ("int4_fused_moe", "qwen3 int4", 513, False),
        ("int4_fused_moe", "gpt-oss", 8, False),
        ("mxfp4_fused_moe", "gpt-oss", 8, True),
        ("mxfp4_fused_moe", "gpt-oss", 512, True),
        ("mxfp4_fused_moe", "gpt-oss", 1, True),
        ("mxfp4_fused_moe", "gpt-oss", 2, True),
        ("int8_fused_moe", "qwen3 int8", 64, True),
        ("int8_fused_moe", "qwen3 int8", 512, False),
    ],
)
def test_which_problems_are_served(op: str, name: str, tokens: int, served: bool) -> None:
    dtypes, sizes = PROBLEMS[name]
    made = problem(dtypes, tokens, **sizes)
    assert any(each.covers(made) for each in ranges(op)) == served
    assert not any(each.covers(made._replace(device=-1)) for each in ranges(op))
    assert not any(each.covers(made._replace(dtype=torch.float32)) for each in ranges(op))


def test_many_pairs_for_each_expert_are_left_to_triton() -> None:
    few = problem(INT4, 512, **{**QWEN3, "group": 128, "top_k": 2, "global_num_experts": 16})
    assert few.pairs_per_expert == grouped_gemm_wq.MAX_PAIRS_PER_EXPERT
    assert any(each.covers(few) for each in ranges("int4_fused_moe"))
    more = few._replace(global_num_experts=15)
    assert not any(each.covers(more) for each in ranges("int4_fused_moe"))


def test_pairs_that_would_be_many_blocks_are_left_to_triton() -> None:
    """Rows of 6,400 columns leave registers for 8 pairs in a block."""
    few = problem(INT4, 192, **{**PHI_MOE, "group": 128})
    configs = grouped_gemm_wq.select_config_pair(few)
    assert configs is not None
    assert configs[0].token_tiles == 1
    assert any(each.covers(few) for each in ranges("int4_fused_moe"))
    assert not any(each.covers(few._replace(m=200)) for each in ranges("int4_fused_moe"))


ON_A_GPU = [
    (op, tokens)
    for op, counts in (
        ("int4_fused_moe", (4, 9, 64, 200, 512)),
        ("mxfp4_fused_moe", (2, 9, 64, 200, 512)),
        ("int8_fused_moe", (4, 9, 64, 200, 256)),
    )
    for tokens in counts
]
DTYPES = {"int4_fused_moe": INT4, "mxfp4_fused_moe": MXFP4, "int8_fused_moe": INT8}


@pytest.mark.parametrize(("op", "tokens"), ON_A_GPU)
def test_what_a_gpu_computes_below_is_served(op: str, tokens: int) -> None:
    group = {"int4_fused_moe": 128, "mxfp4_fused_moe": 32}.get(op, 0)
    made = problem(DTYPES[op], tokens, **{**QWEN3, "group": group})
    assert any(each.covers(made) for each in ranges(op))


@pytest.mark.parametrize(
    "change",
    [{"group": 96}, {"hidden": 2064}, {"inner": 1 << 16}, {"group": 0}, {"weight_dtype": None}],
)
def test_other_sizes_are_left_to_triton(change: dict[str, Any]) -> None:
    made = problem(INT4, 8, **{**QWEN3, "group": 128})
    assert grouped_gemm_wq.fits_kernel_limits(made)
    assert not grouped_gemm_wq.fits_kernel_limits(made._replace(**change))


def gemms_with_config(
    made: MoEProblem,
) -> list[tuple[grouped_gemm_wq.GroupedGemmSpec, grouped_gemm_wq.GroupedGemmConfig]]:
    """Both products of a problem with their configs."""
    products = grouped_gemm_wq.make_gemm_specs(made)
    configs = grouped_gemm_wq.select_config_pair(made)
    assert products is not None
    assert configs is not None
    return list(zip(products, configs, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_configs_fit_and_keep_enough_bytes_in_flight(name: str) -> None:
    dtypes, sizes = PROBLEMS[name]
    for tokens in (2, 8, 32, 64, 128, 256, 512):
        gemms = gemms_with_config(problem(dtypes, tokens, **sizes))
        assert len({config.token_tiles for _, config in gemms}) == 1
        for product, config in gemms:
            size = config.shared_bytes(product)
            assert size <= 226 << 10
            assert config.blocks * (size + (1 << 10)) <= 228 << 10
            in_flight = config.blocks * config.stages * config.stage_bytes(product)
            assert in_flight >= grouped_gemm_wq.MIN_BYTES_IN_FLIGHT
            assert product.k % (config.k_tile * config.warps) == 0
            per_block = product.n // (config.row_tiles * (8 if product.gated else 16))
            assert per_block % config.chunk == 0


@requires_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_configs_compile_without_spills(name: str, tmp_path: Path) -> None:
    dtypes, sizes = PROBLEMS[name]
    # K tiles of 32 columns spill 20 bytes with 512 tokens
    for tokens in (2, 64, *(() if "32" in name else (512,))):
        for product, config in gemms_with_config(problem(dtypes, tokens, **sizes)):
            macros = grouped_gemm_wq.kernel_macros(BF, product, config, 0)
            compiles_without_spills("grouped_gemm_wq.cu", macros, tmp_path / "kernel.cubin")


@requires_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("source", ["moe_align.cu", "moe_combine.cu"])
def test_the_other_kernels_compile(source: str, tmp_path: Path) -> None:
    compiles_without_spills(source, [], tmp_path / "kernel.cubin")


@pytest.mark.gpu
@requires_cuda_kernels
@pytest.mark.parametrize(("op", "tokens"), ON_A_GPU)
def test_experts_on_a_gpu(op: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_moe_on_gpu(op, (tokens, 2048, 768, 128, 8), monkeypatch)
