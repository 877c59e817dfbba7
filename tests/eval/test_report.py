"""Rows, spreads and plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from modelmill.core.errors import MissingDependency, UsageError
from modelmill.eval import report
from modelmill.eval.report import MeasurementStats


def test_spread() -> None:
    spread = MeasurementStats.from_values([3.0, 1.0, 2.0, 4.0, 5.0])
    assert (spread.median, spread.min, spread.max, spread.p25, spread.p75, spread.runs) == (
        3,
        1,
        5,
        2,
        4,
        5,
    )
    assert spread.scaled(10).max == 50
    rate = spread.to_rate(60)
    assert (rate.median, rate.min, rate.max) == (20, 12, 60)
    assert rate.p25 == pytest.approx(15)
    with pytest.raises(ValueError):
        MeasurementStats.from_values([])


def test_rows_have_what_is_needed_to_measure_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "rows.jsonl"
    row = report.make_row(
        "modelmill bench",
        "latency",
        1.5,
        "ms",
        "a chip",
        spread=MeasurementStats.from_values([1.5]),
    )
    report.append_rows(path, [row])
    report.append_rows(path, [row])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    assert {"command", "device", "versions", "date", "figure", "value", "unit"} <= set(lines[0])
    assert lines[0]["spread"]["median"] == 1.5
    assert "torch" in lines[0]["versions"]
    with pytest.raises(UsageError, match="cannot write"):
        report.append_rows(tmp_path / "a" / "rows.jsonl" / "b", [row])


def test_cpu_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Chip 5 @ 1 GHz\n")
    assert report.cpu_name(info) == "Chip 5 @ 1 GHz"
    assert report.cpu_name(tmp_path / "none")


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "p.png"
    report.plot(path, lambda axes: axes.plot([1, 2], [3, 4]), "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"\.nonsense is not supported; use \.png"):
        report.plot(tmp_path / "p.nonsense", lambda axes: None, "title")
    with pytest.raises(UsageError, match="is a folder; give a file"):
        report.plot(tmp_path, lambda axes: None, "title")
    with pytest.raises(UsageError, match="cannot write the plot"):
        report.plot(path / "p.png", lambda axes: None, "title")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match="pip install"):
        report.plot(path, lambda axes: None, "title")
