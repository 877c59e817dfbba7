"""The report warns where calibration and acceptance read different kinds of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelmill.accept.static_range_check import calibration_out_of_range_share, static_range_report
from tests.accept.build_and_accept import build_and_accept

SMALL = {"calibration_samples": 4, "calibration_length": 64}
RECIPES = [("rptq", {}), ("rptq", {"bits": "w4a8", "splits_per_channel": 2})]


@pytest.mark.parametrize(("recipe", "options"), RECIPES, ids=["fallback", "split channels"])
def test_a_planted_mismatch_is_named(
    recipe: str, options: Any, tiny: Mapping[str, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """Calibrated on one token again and again, while the acceptance ids are random."""
    monkeypatch.setattr(
        "modelmill.builder.calibration_data.load_calibration_ids", lambda *_: [[5] * 64] * 4
    )
    report, _ = build_and_accept(
        tiny["llama"], tmp_path / "e", "float32", recipe, **SMALL, **options
    )
    (warning,) = report["warnings"]
    ranges = report["static_ranges"]
    assert "--calibration FILE" in warning
    assert ranges["worst"]["module"] in warning
    assert ranges["acceptance"] > 0.1 > ranges["calibration"]
    assert "\n" not in warning


@pytest.mark.parametrize(("recipe", "options"), RECIPES, ids=["fallback", "split channels"])
def test_text_of_one_kind_is_not_warned_about(
    recipe: str, options: Any, tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, written = build_and_accept(
        tiny["llama"], tmp_path / "e", "float32", recipe, **SMALL, **options
    )
    assert written, report["reason"]
    assert "warnings" not in report
    assert report["static_ranges"]["calibration"] <= 0.02


def test_engines_without_static_ranges_say_nothing(
    tiny: Mapping[str, Path], tmp_path: Path
) -> None:
    report, _ = build_and_accept(
        tiny["llama"], tmp_path / "e", "float32", "rptq", mode="dynamic", **SMALL
    )
    assert "static_ranges" not in report
    assert "warnings" not in report


class _Use:
    """What was counted: 30 of 100 rows of one module, none of another."""

    counts: Mapping[str, tuple[int, int]] = {"a": (30, 100), "b": (0, 100)}

    def out_of_range_share(self) -> float:
        return 0.15

    def worst_module_and_share(self) -> tuple[str, float]:
        return "a", 0.3


def test_ranges_that_clip_in_calibration_already_are_compared_with_that() -> None:
    """4-bit ranges clip on purpose."""
    use: Any = _Use()
    assert "warnings" in static_range_report(use, [{"outside_range": 0.01}])
    assert "warnings" not in static_range_report(use, [{"outside_range": 0.08}]), (
        "not three times as many"
    )
    assert (
        calibration_out_of_range_share([{"outside_range": 0.5}, {"outside_range": 0.0}, {}]) == 0.25
    )
