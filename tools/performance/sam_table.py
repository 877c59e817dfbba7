"""The table of Segment Anything's ViT-H: each work's newest run beside transformers in turn."""

from __future__ import annotations

from collections.abc import Sequence

from tools.performance.numbers import number
from tools.performance.rows import MeasuredFigure, Row
from tools.performance.tables import format_spread

OURS, PEER, COMPILED = "bfloat16", "transformers", "transformers-compiled"
LINES = {
    ("encoder", 1): ("encoder, one picture, ms", 7.6, 12.5),
    ("encoder", 8): ("encoder, eight pictures, ms (88 pictures/s: 90.9)", 60.8, 90.9),
    ("click", None): (
        "a click on a kept embedding, to three masks of 1800 × 1200 on the host, ms",
        None,
        3.0,
    ),
    ("everything", None): (
        "everything: a picture of 1800 × 1200, 1,024 points, to masks on the host, ms",
        None,
        500.0,
    ),
}


def sam_table(rows: Sequence[Row]) -> list[str]:
    """Lines of the table, and the runs that they come from; a ratio is of one run."""
    known = [row for row in rows if row.get("bench") == "sam" and "depth" not in row]
    head = [
        "work",
        "floor",
        "must",
        "ours, bfloat16",
        "encoder in 8 bits",
        "× faster",
        PEER,
        "× ours",
        COMPILED,
        "× ours",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    conditions: dict[str, None] = {}
    for (work, batch), (title, floor, must) in LINES.items():
        these = [row for row in known if (row["work"], row.get("batch")) == (work, batch)]
        plain = _newest([row for row in these if row["subject"] == OURS])
        if plain is None:
            continue
        reached = "reached" if plain["value"] <= must else "missed"
        cells = [
            title,
            "–" if floor is None else f"{floor:g}",
            f"{must:g}",
            f"**{_subject_text(plain)}** {reached}",
        ]
        eight = _fastest([row for row in these if row["subject"] not in (OURS, PEER, COMPILED)])
        cells += _against(these, eight, faster=True)
        used = [plain]
        for name in (PEER, COMPILED):
            other = _newest([row for row in these if row["subject"] == name])
            cells += _against(these, other, faster=False)
            used += [] if other is None else [other]
        lines.append("| " + " | ".join(cells) + " |")
        for row in [*used, *([] if eight is None else [eight])]:
            shown = ", ".join(
                f"{name} {each}" for name, each in row["versions"].items() if name != "numpy"
            )
            conditions[f"`{row['command']}`, {row['device']}, {shown}, {row['date'][:10]}"] = None
    return [*lines, "", *(f"* {each}" for each in conditions)]


def _newest(rows: Sequence[Row]) -> Row | None:
    return max(rows, key=lambda row: str(row["date"]), default=None)


def _fastest(rows: Sequence[Row]) -> Row | None:
    """Of each subject's newest row the best."""
    newest = {row["subject"]: row for row in sorted(rows, key=lambda row: str(row["date"]))}
    return min(newest.values(), key=lambda row: float(row["value"]), default=None)


def _subject_text(row: Row) -> str:
    rate = f", {number(row['images_per_s'])} pictures/s" if row.get("batch", 1) > 1 else ""
    return format_spread(MeasuredFigure.from_row(row)) + rate


def _against(rows: Sequence[Row], other: Row | None, *, faster: bool) -> list[str]:
    """Another subject's figure, and its ratio to ours of the same run."""
    if other is None:
        return ["–", ""]
    engine_row = next(
        (row for row in rows if row["subject"] == OURS and row["date"] == other["date"]), None
    )
    name = f"{other['subject']} " if faster else ""
    if engine_row is None:
        return [name + _subject_text(other), ""]
    ratio = engine_row["value"] / other["value"] if faster else other["value"] / engine_row["value"]
    return [name + _subject_text(other), f"**{ratio:.2f}**"]
