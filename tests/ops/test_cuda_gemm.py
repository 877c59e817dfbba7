"""Products with TMA: launch configs that fit and cover, sources that compile without
spills.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.cuda.gemm_16bit import gemm, qkv_rope_cache
from modelmill.ops.cuda.norm_quantize import rmsnorm_quant_permute
from tests.ops.nvcc import compiles_without_spills, requires_nvcc

MULTIPROCESSORS = st.integers(1, 300)


@given(
    st.integers(1, gemm.SMALL_M_MAX_ROWS), st.integers(1, 200_000), MULTIPROCESSORS, st.booleans()
)
def test_launch_sizes_fit_and_hold_all_rows(
    rows: int, columns: int, multiprocessors: int, gated: bool
) -> None:
    sizes = gemm.small_m_config(rows, columns, multiprocessors, gated=gated)
    assert sizes.padded_rows >= rows
    assert sizes.padded_rows % (8 * sizes.cluster) == 0
    assert sizes.shared_bytes <= gemm.MAX_SHARED_BYTES
    assert sizes.stages >= 2
    assert sizes.parts == 2 or not gated


@given(st.integers(1, gemm.SMALL_M_MAX_ROWS), st.integers(1, 25_000), st.booleans())
def test_each_multiprocessor_has_one_block_at_most_where_that_can_be(
    rows: int, columns: int, gated: bool
) -> None:
    sizes = gemm.small_m_config(rows, columns, 132, gated=gated)
    width = sizes.width * (1 if gated else sizes.parts)
    widest = 128 if gated else 256
    assert -(-columns // width) <= 132 or width == widest


@given(st.integers(1, 9000), st.integers(1, 2000).map(lambda n: 16 * n), MULTIPROCESSORS)
def test_tiles_fill_at_most_all_of_the_time(rows: int, outputs: int, multiprocessors: int) -> None:
    share = gemm.tile_efficiency(rows, outputs, multiprocessors)
    assert 0 < share <= 1
    pairs = gemm.count_tile_pairs(
        rows, outputs, gemm.select_tile_width(rows, outputs, multiprocessors)
    )
    assert (share == 1) == (rows % 256 == 0 and pairs % max(1, multiprocessors // 2) == 0)


def test_what_was_measured_on_a_card_decides() -> None:
    """Gate and up of 4,096 channels to 2 · 11,008, beside cuBLAS and the gate, hot, in turn."""
    faster = (512, 768, 1000, 1024, 1536, 2048, 3072, 4096)
    slower = (640, 896, 1280)
    served = {
        rows: gemm.tile_efficiency(rows, 22016, 132) >= gemm.MIN_TILE_EFFICIENCY
        for rows in (*faster, *slower)
    }
    assert served == dict.fromkeys(faster, True) | dict.fromkeys(slower, False)


def test_each_width_is_met_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "supports_operands", lambda *_: True)
    monkeypatch.setattr(gemm.launch, "sm_count", lambda _: 132)
    x, weight = torch.empty(1, 64), torch.empty(22016, 64)
    met = gemm.large_m_warmup_rows(x, weight, 8192)
    assert {gemm.select_tile_width(rows, 22016, 132) for rows in met} == set(
        gemm.LARGE_M_TILE_WIDTHS
    )
    assert gemm.large_m_warmup_rows(x, weight, 511) == []


@given(st.integers(512, 9000), st.integers(1, 2000).map(lambda n: 16 * n), MULTIPROCESSORS)
def test_the_width_of_tiles_is_the_one_with_the_least_to_compute(
    rows: int, outputs: int, multiprocessors: int
) -> None:
    clusters = max(1, multiprocessors // 2)
    cost = {
        w: w * -(-gemm.count_tile_pairs(rows, outputs, w) // clusters)
        for w in gemm.LARGE_M_TILE_WIDTHS
    }
    chosen = gemm.select_tile_width(rows, outputs, multiprocessors)
    assert cost[chosen] == min(cost.values())
    assert gemm.count_tile_pairs(rows, outputs, chosen) * 256 * chosen >= rows * outputs


def test_the_width_of_tiles_of_a_7b_model() -> None:
    """Six turns for 5.2 pairs a cluster, or six of which each is an eighth shorter."""
    assert gemm.select_tile_width(1024, 22016, 132) == 224
    assert gemm.select_tile_width(4096, 22016, 132) == 256
    assert gemm.select_tile_width(768, 22016, 132) == 256


def test_what_was_measured_decides_where_a_projection_is_rotated_at_once() -> None:
    """4,096 channels to 12,288, beside cuBLAS and the rotation, hot, in turn; to 6,144, of fewer
    heads of keys.
    """
    faster, no_faster = (1024, 2048, 3072, 4096), (512, 640, 768, 896, 1280, 1536)
    assert all(qkv_rope_cache.fused_is_faster(rows, 12288, 132) for rows in faster)
    assert not any(qkv_rope_cache.fused_is_faster(rows, 12288, 132) for rows in no_faster)
    assert qkv_rope_cache.fused_is_faster(4096, 6144, 132)
    assert not qkv_rope_cache.fused_is_faster(1024, 6144, 132)


def test_a_projection_is_met_beforehand_where_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qkv_rope_cache, "supports_operands", lambda *_: True)
    monkeypatch.setattr(qkv_rope_cache.launch, "sm_count", lambda _: 132)
    x, weight = torch.empty(1, 64), torch.empty(12288, 64)
    assert qkv_rope_cache.warmup_sizes(x, weight, 8192) == [1024]
    assert qkv_rope_cache.warmup_sizes(x, weight, 1000) == [1000], (
        "as many as a step may have, served before a tile is full"
    )
    assert qkv_rope_cache.warmup_sizes(x, weight, 900) == []
    assert qkv_rope_cache.warmup_sizes(x, weight, 1) == []


def shifted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Packed, but not at a multiple of 16 bytes."""
    return torch.zeros(1 + torch.Size(shape).numel(), dtype=dtype)[1:].view(shape)


def both(pages: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"k_cache": pages, "v_cache": pages}


PAGES = torch.zeros(3, 2, 16, 64).bfloat16()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"x": torch.zeros(1024, 1, 64).bfloat16()},
        {"q_norm": torch.ones(64)},
        {"k_scale": torch.ones(3, 2, 16), "v_scale": torch.ones(3, 2, 16)},
        {"sin": None},
        {"cos": torch.zeros(32, 1024).T},
        {"cos": shifted(1024, 32)},
        {"sin": torch.zeros(1024, 32).half()},
        {"cos": torch.zeros(1, 32)},
        {"cos": torch.zeros(1024, 64), "sin": torch.zeros(1024, 64)},
        {"q_scale": torch.zeros(1024).bfloat16()},
        {"q_scale": torch.zeros(2048)[::2]},
        {"slots": torch.zeros(1024, dtype=torch.int32)},
        {"slots": torch.zeros(7, dtype=torch.int64)},
        {"heads": 187},
        {"weight": torch.zeros(12288, 72).bfloat16()},
        {"bias": shifted(12288, dtype=torch.bfloat16)},
        both(PAGES.char()),
        both(torch.zeros(3, 2, 24, 64).bfloat16()),
        both(torch.zeros(3, 2, 16, 80).bfloat16()),
        both(shifted(3, 2, 16, 64, dtype=torch.bfloat16)),
        both(torch.zeros(3, 2, 16, 68).bfloat16()[..., :64]),
        both(PAGES[:1].expand(1 << 27, 2, 16, 64)),
        {"k_cache": torch.zeros(3, 16, 2, 64).bfloat16().transpose(1, 2)},
        {"k_cache": PAGES[:2]},
    ],
    ids=lambda change: "+".join(change) or "usual",
)
def test_what_the_rotating_kernel_takes(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qkv_rope_cache, "supports_operands", lambda *_: True)
    monkeypatch.setattr(qkv_rope_cache.launch, "sm_count", lambda _: 132)
    x, weight = torch.zeros(1024, 64).bfloat16(), torch.zeros(12288, 64).bfloat16()
    args = {
        "x": x,
        "weight": weight,
        "bias": None,
        "slots": torch.zeros(1024, dtype=torch.int64),
        "heads": 188,
    }
    args |= both(PAGES) | {"cos": torch.zeros(1024, 32), "sin": torch.zeros(1024, 32)}
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    assert registry.backend_serves_args("qkv_rope_cache", "cuda", **args | change) == (not change)


def test_what_tma_cannot_read_is_left_to_others() -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    assert gemm.is_tma_compatible(x)
    assert not gemm.is_tma_compatible(x[:, 1:])
    assert not gemm.is_tma_compatible(x.T)
    assert not gemm.is_tma_compatible(torch.empty(4, 65, dtype=torch.bfloat16))
    assert not gemm.supports_operands(x, torch.empty(1 << 16, 64, dtype=torch.bfloat16), None), (
        "not on a GPU"
    )


@requires_nvcc
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_compile_without_spills(rows: int, gated: bool, tmp_path: Path) -> None:
    sizes = gemm.small_m_config(rows, 11008, 132, gated=gated)
    compiles_without_spills(
        "gemm_small_m.cu", sizes.macros(torch.bfloat16, gated=gated), tmp_path / "out"
    )


@requires_nvcc
@pytest.mark.parametrize("wide", gemm.LARGE_M_TILE_WIDTHS)
def test_many_rows_compile_without_spills(wide: int, tmp_path: Path) -> None:
    macros = (
        f"BLOCK_N={wide}",
        "BIAS=1",
        f"BAND={gemm.TILES_PER_BAND}",
        *(("HALF",) if wide == 224 else ()),
    )
    compiles_without_spills("gemm_swiglu_large_m.cu", macros, tmp_path / "out")


@requires_nvcc
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16)])
def test_rope_rows_compile_without_spills(dim: int, dtype: torch.dtype, tmp_path: Path) -> None:
    macros = qkv_rope_cache.kernel_macros(dim, biased=dim == 128, dtype=dtype)
    compiles_without_spills("qkv_rope_cache.cu", macros, tmp_path / "out")


PER_TOKEN_MACROS = "PER_TOKEN=1 PER_COLUMN=0 ZERO_POINTS=0 ADD_RESIDUAL=0"
PER_COLUMN_MACROS = "PER_TOKEN=0 PER_COLUMN=1 ZERO_POINTS=1 ADD_RESIDUAL=1"


@requires_nvcc
@pytest.mark.parametrize("what", [PER_TOKEN_MACROS, PER_COLUMN_MACROS])
def test_norms_in_another_order_compile_without_spills(what: str, tmp_path: Path) -> None:
    config = rmsnorm_quant_permute.config_for(4096, 4096, 4)
    sizes = (f"BLOCKS={config.blocks_per_sm}", f"STAGES={config.stages}")
    compiles_without_spills(
        "rmsnorm_quant_permute.cu",
        ("WIDTH=4096", "COLUMNS=4096", *what.split(), *sizes),
        tmp_path / "out",
    )


@requires_nvcc
@pytest.mark.parametrize("what", [PER_TOKEN_MACROS + " FP8", PER_COLUMN_MACROS])
def test_norms_of_a_row_in_another_order_compile_without_spills(what: str, tmp_path: Path) -> None:
    compiles_without_spills(
        "rmsnorm_quant_permute_small_m.cu",
        ("WIDTH=4096", "COLUMNS=8192", "SINGLE_ROW=1", *what.split()),
        tmp_path / "out",
    )
