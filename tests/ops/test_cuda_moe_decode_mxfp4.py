"""moe_decode_mxfp4.cu: what is served, every config, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.ops.cuda.common import launch
from modelmill.ops.cuda.moe import moe_decode_mxfp4
from modelmill.ops.cuda.moe.grouped_gemm_wq import GroupedGemmSpec, make_gemm_specs
from modelmill.ops.cuda.moe.moe_decode_mxfp4 import MoEDecodeConfig
from modelmill.ops.moe_support import MoEProblem
from tests.ops.moe_draws import MXFP4, check_moe_on_gpu
from tests.ops.nvcc import compiles_without_spills, requires_cuda_kernels, requires_nvcc

SMS = 132
SIZES = {
    "gpt-oss-20b": (4, 32, 2880, 2880),
    "qwen3-30b-a3b": (8, 128, 2048, 768),
    "deepseek-v2-lite": (6, 64, 2048, 1408),
    "deepseek-v3": (8, 256, 7168, 2048),
    "phi-moe": (2, 16, 4096, 6400),
}
"""top_k, experts, hidden and inner sizes."""


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU there is, or none."""
    monkeypatch.setattr(launch, "sm_count", lambda _: SMS)


def problem(name: str, **changes: Any) -> MoEProblem:
    top_k, experts, hidden, inner = SIZES[name]
    made = MoEProblem(
        1, top_k, experts, experts, hidden, inner, torch.bfloat16, torch.uint8, torch.uint8,
        group=32, bias=True, device=0,
    )  # fmt: skip
    return made._replace(**changes)


def is_served(made: MoEProblem) -> bool:
    return moe_decode_mxfp4.SUPPORTED_PROBLEMS.covers(made)


@pytest.mark.parametrize("name", SIZES)
def test_one_token_is_served(name: str) -> None:
    assert is_served(problem(name))


@pytest.mark.parametrize(
    "changes",
    [
        {"m": 2},
        {"device": -1},
        {"dtype": torch.float16},
        {"scale_dtype": torch.float16, "group": 128},
        {"weight_dtype": torch.int8, "scale_dtype": torch.float32, "group": 0},
        {"group": 64},
        {"hidden": 2064},
        {"inner": 800},
        {"inner": 1 << 16},
        {"gated": False},
        {"top_k": 17},
        {"global_num_experts": 256},
    ],
)
def test_other_problems_are_left_to_other_kernels(changes: dict[str, Any]) -> None:
    made = problem("qwen3-30b-a3b")
    assert is_served(made)
    assert not is_served(made._replace(**changes))


def products_and_configs(made: MoEProblem) -> list[tuple[GroupedGemmSpec, MoEDecodeConfig]]:
    products, configs = make_gemm_specs(made), moe_decode_mxfp4.select_config_pair(made, SMS)
    assert products is not None
    assert configs is not None
    return list(zip(products, configs, strict=True))


@pytest.mark.parametrize("name", SIZES)
def test_configs_fit(name: str) -> None:
    made = problem(name)
    for product, config in products_and_configs(made):
        assert config.shared_bytes(product, made.top_k) <= moe_decode_mxfp4.MAX_SHARED_BYTES
        assert product.k % (moe_decode_mxfp4.K_TILE * config.warps) == 0
        assert config.threads >= moe_decode_mxfp4.OUTPUT_TILE_ROWS * config.output_tiles_per_block
        needed = config.output_tiles_per_block * moe_decode_mxfp4.stages_per_output_tile(
            product, made.top_k
        )
        assert config.stages_per_team(product, made.top_k) * config.ways >= needed
        assert config.ring * config.ways >= 2
        assert config.output_tiles_per_block * SMS >= moe_decode_mxfp4.num_output_tiles(
            product, made.top_k
        )


def test_blocks_of_both_products_fit_side_by_side() -> None:
    """So that the second one loads weights early."""
    made = problem("gpt-oss-20b")
    both = products_and_configs(made)
    sizes = [config.shared_bytes(product, made.top_k) for product, config in both]
    assert sum(sizes) + 2 * 1024 <= 228 << 10
    assert sum(config.threads for _, config in both) <= 2048


@requires_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_configs_compile_without_spills(name: str, tmp_path: Path) -> None:
    made = problem(name)
    for product, config in products_and_configs(made):
        macros = moe_decode_mxfp4.kernel_macros(product, config, made.top_k, 2, shared=True)
        compiles_without_spills("moe_decode_mxfp4.cu", macros, tmp_path / "kernel.cubin")


@pytest.mark.gpu
@requires_cuda_kernels
@pytest.mark.parametrize("name", SIZES)
def test_experts_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    top_k, experts, hidden, inner = SIZES[name]
    check_moe_on_gpu(MXFP4, (1, hidden, inner, min(experts, 32), top_k), monkeypatch)
