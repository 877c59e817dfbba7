"""Every op of the shelf against its ceiling: its largest case bound by memory, and its largest bound by products."""

from __future__ import annotations

from collections.abc import Sequence

from modelmill.ops.shelf import OPS, SPANS
from tools.performance.rows import Row, newest
from tools.performance.tables import number

HOST = ("decode",)
"""Ops that only a CPU has."""
HEADS = ("op", "largest case", "kernel", "µs", "TB/s", "TFLOP/s", "bound by", "of ceiling", "torch, µs", "date")


def every_op(rows: Sequence[Row]) -> list[str]:
    """A line or two an op, by the rows of ``bench ops`` in bfloat16 (sampling: float32); a dash where there is none."""
    measured = [row for row in rows if row.get("bench") == "op" and {"fraction", "value"} <= row.keys()]
    lines = ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    for op in (*OPS, *SPANS):
        if op in HOST:
            continue
        mine = newest((row for row in measured if row["op"] == op and row["dtype"] == "bfloat16"), "case", "variant")
        picked = [row for row in mine if row.get("chosen") and row["variant"] != "torch"]
        plain = {row["case"]: row for row in mine if row["variant"] == "torch"}
        found = [largest for bound in ("memory", "products") if (largest := _largest(picked, bound)) is not None]
        for place, row in enumerate(found):
            lines.append("| " + " | ".join([op if place == 0 else "", *_cells(row, plain.get(row["case"]))]) + " |")
        if not found:
            lines.append(f"| {op} |" + " – |" * (len(HEADS) - 1))
    return lines


def _largest(rows: Sequence[Row], bound: str) -> Row | None:
    """The case with the most bytes, or the most operations; of several forms of one size the slowest."""
    rate = "gbps" if bound == "memory" else "tflops"
    bounded = [row for row in rows if row["bound"] == bound]
    return max(bounded, key=lambda row: (round(row[rate] * row["value"] / 1e3), row["value"]), default=None)


def _cells(row: Row, plain: Row | None) -> list[str]:
    rates = [number(row["gbps"] / 1e3), number(row["tflops"]) if row.get("tflops") else ""]
    slow = "" if plain is None else number(plain["value"])
    share = f"**{row['fraction']:.2f}**"
    return [row["case"], row["variant"], number(row["value"]), *rates, row["bound"], share, slow, row["date"][:10]]
