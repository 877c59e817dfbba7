"""The table of Segment Anything: ratios are of one run, the newest."""

from __future__ import annotations

from typing import Any

from tools.performance.sam_table import sam_table


def _row(
    subject: str, value: float, date: str, work: str = "encoder", batch: int | None = 1
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "bench": "sam", "work": work, "subject": subject, "value": value, "unit": "ms",
        "date": date,
        "spread": {"min": value - 0.1, "max": value + 0.1, "runs": 9},
        "versions": {"torch": "2.11", "numpy": "2"},
        "command": f"python benchmarks/sam.py {date}", "device": "NVIDIA H200",
    }  # fmt: skip
    return row | ({} if batch is None else {"batch": batch, "images_per_s": batch / value * 1e3})


def test_ratios_are_of_one_run() -> None:
    rows = [
        _row("bfloat16", 20.0, "2026-11-20"),
        _row("fp8", 10.0, "2026-11-20"),
        _row("transformers", 40.0, "2026-11-20"),
        _row("bfloat16", 12.0, "2026-11-21"),
        _row("fp8", 8.0, "2026-11-21"),
        _row("click", 1.0, "2026-11-21") | {"bench": "another"},
    ]
    line = next(line for line in sam_table(rows) if line.startswith("| encoder, one"))
    assert "**12.0 (11.9 … 12.1)** reached" in line
    assert "fp8 8.00 (7.90 … 8.10) | **1.50**" in line
    assert "40.0 (39.9 … 40.1) | **2.00**" in line  # beside the older run of ours


def test_what_was_not_measured_has_no_line() -> None:
    lines = sam_table([_row("bfloat16", 3.5, "2026-11-21", "click", None)])
    assert sum(line.startswith("| ") for line in lines) == 2
    assert "**3.50 (3.40 … 3.60)** missed" in lines[2]
    assert lines[-1].startswith("* `python benchmarks/sam.py 2026-11-21`, NVIDIA H200, torch 2.11")
