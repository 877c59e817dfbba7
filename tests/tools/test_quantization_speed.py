"""The speed half of the page on quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import quantization_speed as speed

LINE = speed.SpeedLine("llama-7b", "int4", "auto", 1, 128, 1.6)


def row(**changed: Any) -> dict[str, Any]:
    """A row as benchmarks/model_step.py writes it."""
    plain = {
        "figure": "step.decode_ms", "batch": 1, "context": 128, "value": 1.5, "floor_ms": 0.9,
        "shape": "llama-7b", "device": "NVIDIA H200", "commit": "abc1234",
        "weights": "int4", "kv": "auto", "date": "2026-01-01",
        "command": "python benchmarks/model_step.py llama-7b -q int4",
        "spread": {"min": 1.4, "max": 1.625},
    }  # fmt: skip
    return plain | changed


def test_the_newest_plain_row_of_a_line_counts() -> None:
    others = [
        row(value=9.0, date="2025-01-01"), row(value=9.0, date="2027-01-01", weights="int8"),
        row(value=9.0, date="2027-01-01", command="… --kernel int4_linear=triton"),
        row(value=9.0, date="2027-01-01", state="before"),
        row(value=9.0, date="2027-01-01", context=4096),
        row(value=9.0, date="2027-01-01", kv="int8"),
    ]  # fmt: skip
    newest = speed.newest([*others, row()], LINE)
    assert newest is not None
    assert newest["value"] == 1.5
    assert speed.newest(others[1:], LINE) is None


@pytest.mark.parametrize(("value", "state"), [(1.5, "reached"), (1.6, "reached"), (1.7, "missed")])
def test_a_line_of_the_table(value: float, state: str) -> None:
    (line,) = speed.table([row(value=value)])[2:]
    assert (
        line == f"| 1 × 128 | `int4` | auto | 0.9 | 1.6 | **{value:.3g}** (1.4 … 1.62) | {state} | "
        "abc1234 |"
    )


def test_several_runs_of_one_commit_are_a_median_that_names_what_missed() -> None:
    spread = {"min": 1.3, "max": 3.0}
    runs = [row(value=1.7, spread=spread), row(value=1.3, floor_ms=1.0)]
    (line,) = speed.table(runs)[2:]
    cells = "| 0.95 | 1.6 | **1.5** (1.3 … 3), 2 runs | reached, missed in 1 | abc1234 |"
    assert line == f"| 1 × 128 | `int4` | auto {cells}"
    other = row(value=1.2, date="2026-01-03", commit="def5678")
    assert speed.newest([*runs, other], LINE) == other
    unnamed = [row(value=value, commit=None) for value in (1.7, 1.3)]
    assert speed.newest(unnamed, LINE) == unnamed[0], "of unknown code nothing is one state"


def test_points_need_both_sides(tmp_path: Path) -> None:
    accuracy = [{"options": "-q int4", "excess": 0.3}, {"options": "-q int8", "excess": 0.001}]
    assert speed.points([row()], accuracy) == [("int4", 1.5, 30.0)]
    assert (
        speed.points([row()], [{"options": "-q int4", "excess": 0.3, "kv_cache_dtype": "int8"}])
        == []
    )
    pytest.importorskip("matplotlib")
    speed.draw_plot([row(), row(weights="dense", value=3.4)], accuracy, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_only_rows_of_steps_are_read(tmp_path: Path) -> None:
    file = tmp_path / "h200.jsonl"
    file.write_text(
        "".join(json.dumps(each) + "\n" for each in (row(), {"figure": "else"}, row(shape=None)))
    )
    assert len(speed.step_rows(file)) == 2
    assert speed.step_rows(tmp_path / "none.jsonl") == []
    file.write_text(json.dumps(row(device="NVIDIA H100")) + "\n" + json.dumps(row(tp=1)) + "\n")
    assert speed.step_rows(file) == [], "another device, and a run over several GPUs"
