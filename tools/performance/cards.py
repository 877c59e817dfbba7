"""First tokens as the targets' marks were taken, on several cards and with either draw of weights."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.make_checkpoint import NORMAL, UNIFORM
from benchmarks.targets import TARGETS
from tools.performance.rows import OURS, Row
from tools.performance.tables import number, told_beside

DRAWS = {UNIFORM: "uniform, as the marks had them", NORMAL: "normal, 1/√inputs"}
WORKS = ("first-1024", "first-4096")
PEER = "vLLM"


def cards(rows: Sequence[Row]) -> list[str]:
    """A line for each first token and draw: ours, vLLM's time and the share that ours takes of it, card by card.

    Rows of ``table.py marks`` that say which ``card`` they are of; code that was tried and dropped is left out.
    """
    measured = [row for row in rows if "card" in row and "tried" not in row and row["work"] in WORKS]
    places = sorted({row["card"] for row in measured})
    heads = ["first token", "weights", "must", "asked of vLLM's time", *(f"card {card}" for card in places), "median"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for work in WORKS:
        target = TARGETS[work]
        asked = "" if target.mark is None else f"{target.must / target.mark:.3f}"
        for weights, named in DRAWS.items():
            found = {(row["card"], row["subject"]): row["value"] for row in measured if drawn(row, work) == weights}
            pairs = [(found.get((card, OURS)), found.get((card, PEER))) for card in places]
            ours = [mine for mine, _ in pairs if mine is not None]
            if ours:
                middle, reached = median(ours), "reached" if median(ours) <= target.must else "missed"
                cells = [target.title, named, f"{target.must:g}", asked, *(_cell(*pair) for pair in pairs)]
                cells.append(f"**{told_beside(middle, target.must)}** {reached}")
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def drawn(row: Row, work: str) -> str | None:
    """How the weights of a row of this work were drawn; None for another work."""
    return str(row.get("weights", NORMAL)) if row["work"] == work else None


def _cell(mine: float | None, theirs: float | None) -> str:
    if mine is None:
        return ""
    return number(mine) if theirs is None else f"{number(mine)} / {number(theirs)} = {mine / theirs:.3f}"
