"""Products by the copy engine: launch sizes that fit and cover, sources that compile without spills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops.cuda import norm_order, products
from tests.ops.nvcc import compiles_without_spills, needed

MULTIPROCESSORS = st.integers(1, 300)


@given(st.integers(1, products.MOST_ROWS), st.integers(1, 200_000), MULTIPROCESSORS, st.booleans())
def test_launch_sizes_fit_and_hold_all_rows(rows: int, columns: int, multiprocessors: int, gated: bool) -> None:
    sizes = products.sizes_of(rows, columns, multiprocessors, gated=gated)
    assert sizes.box >= rows
    assert sizes.box % (8 * sizes.cluster) == 0
    assert sizes.shared <= products.MOST_SHARED
    assert sizes.stages >= 2
    assert sizes.parts == 2 or not gated


@given(st.integers(1, products.MOST_ROWS), st.integers(1, 25_000), st.booleans())
def test_each_multiprocessor_has_one_block_at_most_where_that_can_be(rows: int, columns: int, gated: bool) -> None:
    sizes = products.sizes_of(rows, columns, 132, gated=gated)
    width = sizes.wide * (1 if gated else sizes.parts)
    widest = 128 if gated else 256
    assert -(-columns // width) <= 132 or width == widest


@given(st.integers(1, 9000), st.integers(1, 2000).map(lambda n: 8 * n), MULTIPROCESSORS)
def test_tiles_fill_at_most_all_of_the_time(rows: int, columns: int, multiprocessors: int) -> None:
    share = products.filled(rows, columns, multiprocessors)
    assert 0 < share <= 1
    pairs = products.pairs_of(rows, columns, products.wide_of(rows, columns, multiprocessors))
    assert (share == 1) == (rows % 256 == 0 and pairs % max(1, multiprocessors // 2) == 0)


def test_what_was_measured_on_a_card_decides() -> None:
    """Gate and up of 4,096 channels to 2 · 11,008, beside cuBLAS and the gate, hot, in turn."""
    faster = (512, 768, 1000, 1024, 1536, 2048, 3072, 4096)
    slower = (640, 896, 1280)
    served = {rows: products.filled(rows, 11008, 132) >= products.LEAST_FILLED for rows in (*faster, *slower)}
    assert served == dict.fromkeys(faster, True) | dict.fromkeys(slower, False)


def test_each_width_is_met_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_readable", lambda *_: True)
    monkeypatch.setattr(products.launch, "multiprocessors", lambda _: 132)
    x, weight = torch.empty(1, 64), torch.empty(22016, 64)
    met = products.many_forms(x, weight, 8192)
    assert {products.wide_of(rows, 11008, 132) for rows in met} == set(products.TILE_WIDES)
    assert products.many_forms(x, weight, 511) == []


@given(st.integers(512, 9000), st.integers(1, 2000).map(lambda n: 8 * n), MULTIPROCESSORS)
def test_the_width_of_tiles_is_the_one_with_the_least_to_compute(rows: int, columns: int, multiprocessors: int) -> None:
    clusters = max(1, multiprocessors // 2)
    cost = {w: w * -(-products.pairs_of(rows, columns, w) // clusters) for w in products.TILE_WIDES}
    chosen = products.wide_of(rows, columns, multiprocessors)
    assert cost[chosen] == min(cost.values())
    assert products.pairs_of(rows, columns, chosen) * 256 * (chosen // 2) >= rows * columns


def test_the_width_of_tiles_of_a_7b_model() -> None:
    """Six turns for 5.2 pairs a cluster, or six of which each is an eighth shorter."""
    assert products.wide_of(1024, 11008, 132) == 224
    assert products.wide_of(4096, 11008, 132) == 256
    assert products.wide_of(768, 11008, 132) == 256


def test_what_the_copy_engine_cannot_read_is_left_to_others() -> None:
    x = torch.empty(4, 64, dtype=torch.bfloat16)
    assert products.copyable(x)
    assert not products.copyable(x[:, 1:])
    assert not products.copyable(x.T)
    assert not products.copyable(torch.empty(4, 65, dtype=torch.bfloat16))
    assert not products.few_serves(x, torch.empty(1 << 16, 64, dtype=torch.bfloat16), None), "not on a GPU"


@needed
@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_compile_without_spills(rows: int, gated: bool, tmp_path: Path) -> None:
    sizes = products.sizes_of(rows, 11008, 132, gated=gated)
    compiles_without_spills("few_rows.cu", sizes.macros(torch.bfloat16, gated=gated), tmp_path / "out")


@needed
@pytest.mark.parametrize("wide", products.TILE_WIDES)
def test_many_rows_compile_without_spills(wide: int, tmp_path: Path) -> None:
    macros = (f"WIDE={wide}", "BIAS=1", f"BAND={products.BAND}", *(("HALF",) if wide == 224 else ()))
    compiles_without_spills("many_rows.cu", macros, tmp_path / "out")


@needed
@pytest.mark.parametrize("what", ["TOKEN=1 EACH=0 SHIFT=0 ADD=0", "TOKEN=0 EACH=1 SHIFT=1 ADD=1"])
def test_norms_in_another_order_compile_without_spills(what: str, tmp_path: Path) -> None:
    form = norm_order.cut(4096, 4096, 4)
    sizes = (f"BLOCKS={form.blocks}", f"STAGES={form.stages}")
    compiles_without_spills("norm_order.cu", ("WIDTH=4096", "COLUMNS=4096", *what.split(), *sizes), tmp_path / "out")


@needed
@pytest.mark.parametrize("what", ["TOKEN=1 EACH=0 SHIFT=0 ADD=0 FP8", "TOKEN=0 EACH=1 SHIFT=1 ADD=1"])
def test_norms_of_a_row_in_another_order_compile_without_spills(what: str, tmp_path: Path) -> None:
    compiles_without_spills("norm_row.cu", ("WIDTH=4096", "COLUMNS=8192", "ALONE=1", *what.split()), tmp_path / "out")
