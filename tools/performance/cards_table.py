"""First tokens as the targets' marks were taken, on several cards and with weights drawn in either
way.
"""

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
    """A line for each first token and draw: ours, vLLM's time and the share that ours takes of it,
    card by card.

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
        "asked of vLLM's time",
        *(f"card {card}" for card in places),
        "median",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for work in WORKLOADS:
        target = TARGETS[work]
        asked = (
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
            ours = [found[OURS] for found in sides.values() if OURS in found]
            if ours:
                middle, reached = (
                    median(ours),
                    "reached" if median(ours) <= target.required else "missed",
                )
                cells = [
                    target.title,
                    named,
                    f"{target.required:g}",
                    asked,
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
    mine, theirs = sides.get(OURS), sides.get(PEER)
    if mine is None:
        return ""
    return (
        number(mine)
        if theirs is None
        else f"{number(mine)} / {number(theirs)} = {mine / theirs:.3f}"
    )
