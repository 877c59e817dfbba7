"""The conversation trace on docs/quantization.md: benchmarks/trace_steps.py per weight format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.performance.rows import read_rows
from tools.performance.runs import H200, on_device

TARGET_RATIO = 1.6
"""Times bfloat16's requests a second that W8A8 with int8 keys and values must reach."""
Row = Mapping[str, Any]


def core_rows(file: Path) -> list[Row]:
    """The rows of the loop alone on one H200."""
    rows = on_device(read_rows(file), H200)
    return [row for row in rows if row.get("figure") == "trace.loop_s" and "weights" in row]


def newest(rows: Sequence[Row]) -> list[Row]:
    """Those of the newest run that has bfloat16 beside something else.

    A run is rows of one command that follow one another; where one of them comes again, another run
    begins.
    """
    runs: list[list[Row]] = []
    for row in rows:
        last = runs[-1] if runs else []
        again = any(_row_key(each) == _row_key(row) for each in last)
        if not last or again or last[-1]["command"] != row["command"]:
            runs.append([])
        runs[-1].append(row)
    complete_runs = [
        run
        for run in runs
        if len({row["weights"] for row in run}) > 1 and any(_is_plain(r) for r in run)
    ]
    return max(complete_runs, key=lambda run: run[-1]["date"], default=[])


def table(run: Sequence[Row]) -> list[str]:
    """Markdown lines; "× bfloat16" is a ratio of this run."""
    plain = next((row for row in run if _is_plain(row)), None)
    if plain is None:
        return []
    lines = [
        "| weights | KV | tokens of a step with prompts | s | requests/s | × bfloat16 | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in run:
        ratio = plain["value"] / row["value"]
        judged = row["weights"] == "smoothquant" and row["kv"] == "int8"
        state = ("reached" if ratio >= TARGET_RATIO else "missed") if judged else ""
        cells = (
            f"`{row['weights']}`", row["kv"], str(row.get("mixed") or "default of that day"),
            f"{row['value']:.2f}",
            f"{row['requests_per_s']:.1f}", f"{ratio:.2f}", state,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _row_key(row: Row) -> tuple[Any, ...]:
    return row["weights"], row["kv"], row.get("mixed")


def _is_plain(row: Row) -> bool:
    return row["weights"] == "dense" and row["kv"] == "auto"
