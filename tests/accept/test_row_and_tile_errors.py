"""Faults of one row, one scale or one tile: a whole matrix's errors hide them, the matrix's parts
do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.row_and_tile_errors import compare_matrix, compare_matrix_row_blocks
from modelmill.accept.tolerances import ErrorBound, weight_bound, worst_block_bound
from modelmill.quant import fp8, int4, int8, smoothquant
from modelmill.weights import base
from tests.accept.build_and_accept import build_and_accept, save_tiny

RECIPES = {"fp8": fp8, "int8": int8, "smoothquant": smoothquant, "int4": int4}
INNER = 80  # of the small llama: what down_proj reads
SMALL = {
    "calibration_samples": 4,
    "calibration_length": 64,
    "group_size": 32,
    "alpha": "0.5",
    "max_layer_error": None,
}


def _blocks(weight_format: str) -> ErrorBound:
    bound = worst_block_bound(weight_format)
    assert bound is not None
    return bound


def scale_off(weight: Tensor) -> Tensor:
    """One row a tenth larger."""
    out = weight.clone()
    out[5] *= 1.1
    return out


def rows_swapped(weight: Tensor) -> Tensor:
    out = weight.clone()
    out[[3, 9]] = out[[9, 3]]
    return out


def tile_negated(weight: Tensor) -> Tensor:
    out = weight.clone()
    out[8:24, 8:24] *= -1  # 16 × 16, all within one of the judged tiles
    return out


def tile_moved(weight: Tensor) -> Tensor:
    """A tile of 32 × 32 from elsewhere, across four of the judged tiles."""
    out = weight.clone()
    out[16:48, 16:48] = weight[-32:, -32:]
    return out


FAULTS = [scale_off, rows_swapped, tile_negated, tile_moved]
FAULT = Callable[[Tensor], Tensor]


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


# Ten per cent of a scale is what rounding to 16 levels does to rows, too.
SHOWN = [
    (fmt, fault)
    for fmt in ("fp8", "int8", "w8a8", "int4")
    for fault in FAULTS
    if (fmt, fault) != ("int4", scale_off)
]
HIDDEN = [("fp8", scale_off), ("int8", scale_off), ("w8a8", scale_off), ("fp8", rows_swapped),
    ("int4", rows_swapped),
          ("fp8", tile_moved)]  # fmt: skip


@pytest.mark.parametrize(("weight_format", "fault"), SHOWN)
def test_the_parts_show_what_the_matrix_hides(weight_format: str, fault: FAULT) -> None:
    """A matrix of the size of SmolLM2's gate and up."""
    expected = random_matrix(1536, 576)
    actual = base.pack_as_format(weight_format, fault(expected), torch.float32).dequantize()
    if (weight_format, fault) in HIDDEN:
        assert not weight_bound("float32", weight_format).describe_violations(
            compare_tensors("w", actual, expected)
        ), "the whole matrix looks rounded"
    assert _blocks(weight_format).describe_violations(compare_matrix("w", actual, expected)[1])


@pytest.mark.parametrize("weight_format", ["fp8", "int8", "w8a8", "int4"])
@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 70), columns=st.integers(1, 90), spread=st.floats(0, 2), zero=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_rounding_is_within_the_bounds(
    weight_format: str, rows: int, columns: int, spread: float, zero: bool, seed: int
) -> None:
    """Whatever the shape, rows of very different sizes and rows of zeros among them."""
    expected = random_matrix(rows, columns, seed) * torch.exp(
        spread * random_matrix(rows, 1, seed + 1)
    )
    if zero:
        expected[rows // 2] = 0
    metrics = compare_matrix(
        "w", base.pack_as_format(weight_format, expected, torch.float32).dequantize(), expected
    )[1]
    assert not _blocks(weight_format).describe_violations(metrics), metrics


def test_the_numbers_are_those_of_the_worst_row_and_tile() -> None:
    expected = torch.ones(64, 40)
    actual = expected.clone()
    actual[3] *= 1.5
    actual[40, 33] = 5.0  # in the tile of 32 rows and the last 8 columns
    metrics = compare_matrix("w", actual, expected)[1]
    assert metrics.rel_l2 == pytest.approx((16 / 40) ** 0.5)
    assert metrics.gain == pytest.approx(1.5)
    assert metrics.max_rel == pytest.approx((16 / (32 * 8)) ** 0.5)


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    last=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_it_makes_no_difference_where_a_matrix_is_cut(
    blocks: list[int], last: int, seed: int
) -> None:
    expected = random_matrix(32 * sum(blocks) + last, 45, seed) * torch.exp(
        random_matrix(32 * sum(blocks) + last, 1, seed + 1)
    )
    actual = expected + 0.1 * random_matrix(*expected.shape, seed + 2)
    sizes = [*(32 * block for block in blocks), last]
    matrix_row, parts = compare_matrix_row_blocks(
        "w", zip(actual.split(sizes), expected.split(sizes), strict=True)
    )
    once, worst = compare_matrix("w", actual, expected)
    plain = compare_tensors("w", actual, expected)
    for name in ("max_abs", "mean_abs", "max_rel", "rel_l2", "cosine", "scale"):
        assert getattr(matrix_row, name) == pytest.approx(getattr(plain, name), rel=1e-6), name
    # sums in another order
    for name in vars(worst).keys() - {"name"}:
        assert getattr(parts, name) == pytest.approx(getattr(worst, name), rel=1e-9), name
    assert matrix_row.gain == pytest.approx(once.gain, rel=1e-9)
    error = (actual.double() - expected.double()).abs()
    assert (
        matrix_row.median_abs
        == once.median_abs
        == pytest.approx(float(error[::8].median(1).values.median()))
    )


def test_nothing_and_what_is_not_finite() -> None:
    zeros = torch.zeros(4, 4)
    for row in compare_matrix("w", zeros, zeros):
        assert not _blocks("fp8").describe_violations(row)
        assert row.rel_l2 == 0
    for actual, expected in (
        (zeros + 1, zeros),
        (zeros * torch.nan, zeros + 1),
        (zeros, zeros[:2]),
        (zeros[:2], zeros),
    ):
        for row in compare_matrix("w", actual, expected):
            assert _blocks("int4").describe_violations(row)


def _four_bits(weight: Tensor) -> Tensor:
    """The values rounded to 15 levels, one scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    return (weight / scale).round() * scale


def test_the_gain_of_few_weights_is_left_to_chance() -> None:
    """300 gates of one row, rounded alike: their gain strays as far as is foreseen for each."""
    generator = torch.Generator().manual_seed(3)
    bound = weight_bound("float32", "int4")
    rows = []
    for _ in range(300):
        gate = torch.randn(1, 36, generator=generator)
        rows.append(compare_matrix("gate", _four_bits(gate), gate)[0])
    off = torch.tensor([row.gain - 1 for row in rows])
    foreseen = torch.tensor([row.gain_std for row in rows])
    assert float(off.std()) == pytest.approx(float(foreseen.mean()), rel=0.3)
    assert int((off.abs() > bound.gain).sum()) > 30  # without it each of these is refused
    assert not [row for row in rows if bound.describe_violations(row)]


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_a_factor_on_a_small_matrix_is_no_chance(factor: float) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    right, _ = compare_matrix("w", _four_bits(weight), weight)
    wrong, _ = compare_matrix("w", _four_bits(weight) * factor, weight)
    bound = weight_bound("float32", "int4")
    assert not bound.describe_violations(right)
    assert "|gain - 1|" in " ".join(bound.describe_violations(wrong))
    # the factor does not widen its own bound
    assert wrong.gain_std == pytest.approx(right.gain_std, rel=0.1)


def test_the_gain_of_many_weights_has_the_published_bound() -> None:
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(5))
    row, _ = compare_matrix("w", _four_bits(weight), weight)
    bound = weight_bound("float32", "int4")
    assert row.gain_std == 0
    assert bound.gain_deviation_limit(row) == bound.gain


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fault", [None, scale_off, rows_swapped])
def test_an_engine_with_such_a_fault_is_refused(
    recipe: str, fault: FAULT | None, llama: Path, tmp_path: Path
) -> None:
    if recipe == "int4" and fault is scale_off:
        pytest.skip("ten per cent is what rounding to 16 levels does to rows, too")
    real_quantize = RECIPES[recipe].RECIPE.quantize
    fallen: list[Any] = []

    def hold(self: Any, weight: Tensor, statistics: Any) -> Any:
        if fault is None or weight.shape[1] != INNER:
            return real_quantize(self, weight, statistics)
        fallen.append(weight)
        return real_quantize(self, fault(weight), statistics)

    with mock.patch.object(RECIPES[recipe].RECIPE, "quantize", hold):
        report, written = build_and_accept(llama, tmp_path / "e", "float32", recipe, **SMALL)
    assert written == (fault is None), report["reason"]
    assert bool(fallen) == (fault is not None)
    parts = [row for row in report["layers"] if row["name"].endswith(".worst_block")]
    assert {row["ok"] for row in parts} == ({True} if fault is None else {True, False})
