"""The table of MiniGPT-4: each work's newest run beside transformers', and a newer run alone."""

from __future__ import annotations

from collections.abc import Sequence

from tools.performance.numbers import number
from tools.performance.rows import MeasuredFigure, Row
from tools.performance.tables import format_spread

WORKLOADS = {
    ("encoder", 1): "tower, Q-Former and projection, one picture, ms",
    ("encoder", 16): "the same, 16 pictures at once, ms",
    ("first", 1): "first token of a request, ms",
    ("request", 1): "a request: 100 tokens of text, a picture, 100 new tokens, ms",
    ("many", 64): "64 such requests at once, requests/s",
}
TARGETS_MS = {
    ("encoder", 1, "bfloat16"): 15.0,
    ("request", 1, "bfloat16"): 400.0,
    ("request", 1, "int4"): 190.0,
    ("many", 64, "bfloat16"): 60.0,
}
PEER = "transformers"
RENAMED_WORKLOADS = {"eyes": "encoder"}
"""Names of workloads in rows before 2026-11-24 → names now."""


def minigpt4_table(rows: Sequence[Row]) -> list[str]:
    """Lines of the table, and the runs that they come from."""
    known = [
        row | {"work": RENAMED_WORKLOADS.get(row["work"], row["work"])}
        for row in rows
        if row.get("bench") == "minigpt4"
    ]
    known = [row for row in known if (row["work"], row["pictures"]) in WORKLOADS]
    names = list(dict.fromkeys(row["subject"] for row in known if row["subject"] != PEER))
    version = next((row["versions"][PEER] for row in reversed(known) if row["subject"] == PEER), "")
    head = ["work", *names, f"{PEER} {version}", "× ours, bfloat16"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    conditions: dict[str, None] = {}
    for key, title in WORKLOADS.items():
        these = [row for row in known if (row["work"], row["pictures"]) == key]
        newest = max((row["date"] for row in these), default=None)
        # a run with the peer, if there is one
        beside = max((row["date"] for row in these if row["subject"] == PEER), default=newest)
        for date in dict.fromkeys((beside, newest)):
            run = {row["subject"]: row for row in these if row["date"] == date}
            cells = [_cell(run.get(name), key) for name in (*names, PEER)]
            plain, peer = run.get("bfloat16"), run.get(PEER)
            ratio = f"**{peer['value'] / plain['value']:.2f}**" if plain and peer else ""
            label = title if date == beside else f"{title} (newest)"
            lines.append("| " + " | ".join([label, *cells, ratio]) + " |")
            for row in run.values():
                shown = ", ".join(
                    f"{name} {each}" for name, each in row["versions"].items() if name != "numpy"
                )
                conditions[f"`{row['command']}`, {row['device']}, {shown}, {row['date'][:10]}"] = (
                    None
                )
    return [*lines, "", *(f"* {each}" for each in conditions)]


def _cell(row: Row | None, key: tuple[str, int]) -> str:
    if row is None:
        return "–"
    must = TARGETS_MS.get((*key, row["subject"]))
    if key[0] == "many":
        rate = row["requests_per_s"]
        reached = "" if must is None else f" ({'reached' if rate >= must else 'missed'}: {must:g})"
        return f"**{number(rate)}**{reached}"
    reached = (
        "" if must is None else f" ({'reached' if row['value'] <= must else 'missed'}: {must:g})"
    )
    return f"**{number(row['value'])}**{format_spread(MeasuredFigure.from_row(row)).removeprefix(number(row['value']))}{reached}"  # noqa: E501
