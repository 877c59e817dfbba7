"""The trace on the page on quantization: which run is shown, and what is claimed of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools import quantization_trace as trace


def row(
    weights: str = "dense", kv: str = "auto", value: float = 28.0, **changed: Any
) -> dict[str, Any]:
    """A row as benchmarks/trace_steps.py writes it."""
    plain = {
        "figure": "trace.loop_s", "value": value, "weights": weights, "kv": kv, "mixed": 768,
        "date": "2026-01-02", "device": "NVIDIA H200",
        "requests_per_s": 500 / value, "command": "python benchmarks/trace_steps.py one",
    }  # fmt: skip
    return plain | changed


def test_ratios_are_of_one_run() -> None:
    lines = trace.table(
        [
            row(),
            row("smoothquant", "int8", 17.5, mixed=None),
            row("smoothquant", "int8", 20.0, mixed=1024),
        ]
    )
    assert lines[2:] == [
        "| `dense` | auto | 768 | 28.00 | 17.9 | 1.00 |  |",
        "| `smoothquant` | int8 | default of that day | 17.50 | 28.6 | 1.60 | reached |",
        "| `smoothquant` | int8 | 1024 | 20.00 | 25.0 | 1.40 | missed |",
    ]
    assert trace.table([row("smoothquant", "int8")]) == []


def test_the_newest_run_with_bfloat16_beside_another_counts(tmp_path: Path) -> None:
    pair = [row(), row("smoothquant", "int8", 17.0)]
    newer = [
        {**each, "command": "python benchmarks/trace_steps.py two", "date": "2026-01-03"}
        for each in pair
    ]
    alone = row(
        "smoothquant",
        "int8",
        1.0,
        command="python benchmarks/trace_steps.py three",
        date="2026-01-04",
    )
    assert trace.newest([*newer, *pair, alone]) == newer
    later = [{**each, "date": "2026-02-01"} for each in pair]
    assert trace.newest([*pair, *later]) == later, "the same command on another day"
    assert trace.newest([alone]) == []
    file = tmp_path / "h200.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (*pair, {"figure": "else"})))
    assert trace.core_rows(file) == pair
    assert trace.core_rows(tmp_path / "none.jsonl") == []
