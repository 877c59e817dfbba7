"""Every op against its roofline: its largest memory-bound and its largest compute-bound case."""

from __future__ import annotations

from collections.abc import Sequence

from modelmill.ops.registry import op_names
from tools.performance.numbers import number
from tools.performance.rows import Row, newest

HOST_OPS = ("decode",)
"""Ops that only a CPU has."""
LAUNCH_BOUND_BYTES = 4e6
"""Bytes, a microsecond of a GPU's memory.

A case that moves fewer is its launch's: it says nothing about memory.
"""
HEADS = (
    "op",
    "largest case",
    "kernel",
    "µs",
    "TB/s",
    "TFLOP/s",
    "bound by",
    "of ceiling",
    "torch, µs",
    "date",
)


def ops_table(rows: Sequence[Row]) -> list[str]:
    """Return a line or two per op for the selected kernels, from ``bench ops`` rows; else a dash.

    In bfloat16; ops that have no row in it, in float32.
    """
    measured = [row for row in rows if row.get("bench") == "op" and "value" in row]
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for op in op_names():
        if op in HOST_OPS:
            continue
        op_rows = _in_one_dtype([row for row in measured if row["op"] == op])
        picked = [row for row in op_rows if row.get("chosen")]
        plain = {row["case"]: row for row in op_rows if row["variant"] == "torch"}
        dtype_rows = [
            largest
            for bound in ("memory", "products", None)
            if (largest := _largest(picked, bound)) is not None
        ]
        telling = [
            row
            for row in dtype_rows
            if row["bound"] != "memory" or row["gbps"] * row["value"] * 1e3 >= LAUNCH_BOUND_BYTES
        ]
        dtype_rows = telling or dtype_rows
        for place, row in enumerate(dtype_rows):
            lines.append(
                "| "
                + " | ".join([op if place == 0 else "", *_cells(row, plain.get(row["case"]))])
                + " |"
            )
        if not dtype_rows:
            lines.append(f"| {op} |" + " – |" * (len(HEADS) - 1))
    return lines


def _in_one_dtype(rows: Sequence[Row]) -> list[Row]:
    """The newest of each case and variant."""
    for dtype in ("bfloat16", "float32"):
        selected = newest((row for row in rows if row["dtype"] == dtype), "case", "variant")
        if selected:
            return selected
    return []


def _largest(rows: Sequence[Row], bound: str | None) -> Row | None:
    """Return the case with the most bytes, or the most operations; of equal sizes the slowest."""
    rate = {"memory": "gbps", "products": "tflops"}.get(bound or "", "")
    bounded = [row for row in rows if row.get("bound") == bound]
    return max(
        bounded,
        key=lambda row: (round(row.get(rate, 0) * row["value"] / 1e3), row["value"]),
        default=None,
    )


def _cells(row: Row, plain: Row | None) -> list[str]:
    rates = [
        number(row["gbps"] / 1e3) if row.get("gbps") else "",
        number(row["tflops"]) if row.get("tflops") else "",
    ]
    slow = "" if plain is None or plain is row else number(plain["value"])
    share = f"**{row['fraction']:.2f}**" if "fraction" in row else "–"
    bound = row.get("bound") or "–"
    return [
        row["case"],
        row["variant"],
        number(row["value"]),
        *rates,
        bound,
        share,
        slow,
        row["date"][:10],
    ]
