"""The measured rows, and the newest of each figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
OURS = "modelmill"
RENAMED_OPS = {
    "rotation": "rope_cos_sin",
    "gelu_linear": "linear_gelu",
    "cluster_quant": "rptq_quant",
    "clustered_linear": "rptq_linear",
    "enlarge": "upsample_masks",
    "gated_linear": "linear_swiglu",
    "gated_int8_linear": "int8_linear_swiglu",
    "gated_int4_linear": "int4_linear_swiglu",
    "gated8_linear": "w8a8_linear_swiglu",
    "add_linear": "linear_add",
    "rope_linear": "qkv_rope_cache",
}
"""Ops under the names that rows measured before November 2026 have, and what they are called now.
"""
LAUNCH_BOUND_BYTES = 4e6
"""Bytes, a microsecond of a GPU's memory.

A case that moves fewer is its launch's: it says nothing about memory.
"""


def read_rows(path: Path) -> list[Row]:
    """The rows of a jsonl file in order; none where there is no file.

    Raises ValueError naming a line that is none.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                raise ValueError(f"{path}, line {number} is not JSON") from None
            if row.get("op") in RENAMED_OPS:
                row["op"] = RENAMED_OPS[row["op"]]
            rows.append(row)
    return rows


def rows_by_state(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group rows that name a ``state`` of the code by (run, work), where there is a comparison."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "state" in row and "run" in row and "value" in row:
            groups.setdefault((row["run"], workload_text(row)), []).append(row)
    return {key: group for key, group in groups.items() if len(group) > 1}


def workload_text(row: Row) -> str:
    """The work of a row with a state, in words."""
    if "batch" in row and "context" in row:
        return f"decode, batch {row['batch']}, context {row['context']:,}"
    if "batch" in row and "tokens" in row:
        return f"prefill, batch {row['batch']}, {row['tokens']:,} tokens"
    if row.get("op"):
        return " ".join(str(row[key]) for key in ("op", "dtype", "case") if key in row)
    return {"trace.loop_s": "the trace, the loop alone"}.get(
        str(row.get("figure")), str(row.get("figure", "?"))
    )


def row_unit(row: Row) -> str:
    """The row's unit, or what its figure's name ends in."""
    return str(row.get("unit") or str(row.get("figure", "")).rpartition("_")[2])
