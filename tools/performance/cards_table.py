"""First tokens, measured like the targets' references, on several GPUs and weight draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.make_checkpoint import NORMAL, UNIFORM
from benchmarks.targets import TARGETS
from tools.performance.numbers import number
from tools.performance.rows import OURS, Row
from tools.performance.tables import format_against_target

WEIGHT_INITS = {UNIFORM: "uniform, as the marks had them", NORMAL: "normal, 1/√inputs"}
WORKLOADS = ("first-1024", "first-4096")
PEER = "vLLM"


def cards_table(rows: Sequence[Row]) -> list[str]:
    """Return a line per first token and weight draw: ours, vLLM's time, and their ratio per GPU.

    Rows of ``table.py marks`` that say which ``card`` they are of; a cell has both sides of a
    card's newest run. Code that was tried and dropped is left out.
    """
    marked = [
        row for row in rows if row.get("bench") == "table" and "card" in row and "tried" not in row
    ]
    measured = [row for row in marked if row["work"] in WORKLOADS]
    places = sorted({row["card"] for row in measured})
    heads = [
        "first token",
        "weights",
        "must",
        "required share of vLLM's time",
        *(f"card {card}" for card in places),
        "median",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for work in WORKLOADS:
        target = TARGETS[work]
        required = (
            ""
            if target.reference_mark is None
            else f"{target.required / target.reference_mark:.3f}"
        )
        for weights, named in WEIGHT_INITS.items():
            drawn = [
                row
                for row in measured
                if row["work"] == work and row.get("weights", NORMAL) == weights
            ]
            sides = {
                card: _newest_by_side([row for row in drawn if row["card"] == card])
                for card in places
            }
            engine_values = [values[OURS] for values in sides.values() if OURS in values]
            if engine_values:
                middle, reached = (
                    median(engine_values),
                    "reached" if median(engine_values) <= target.required else "missed",
                )
                cells = [
                    target.title,
                    named,
                    f"{target.required:g}",
                    required,
                    *map(_cell, sides.values()),
                ]
                cells.append(f"**{format_against_target(middle, target.required)}** {reached}")
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def _newest_by_side(rows: Sequence[Row]) -> dict[str, float]:
    """What each side took in the newest run of a card."""
    run = max(rows, key=lambda row: str(row["date"]))["run"] if rows else None
    return {row["subject"]: row["value"] for row in rows if row["run"] == run}


def _cell(sides: Mapping[str, float]) -> str:
    engine_value, reference = sides.get(OURS), sides.get(PEER)
    if engine_value is None:
        return ""
    return (
        number(engine_value)
        if reference is None
        else f"{number(engine_value)} / {number(reference)} = {engine_value / reference:.3f}"
    )
