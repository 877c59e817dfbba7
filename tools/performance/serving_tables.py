"""``modelmill serve`` beside another server under the same load: the newest run."""

from __future__ import annotations

from collections.abc import Sequence

from tools.performance.numbers import number, ratio_number
from tools.performance.provenance import provenance_line
from tools.performance.rows import OURS, Row
from tools.performance.runs import can_carry_a_claim

HEADS = (
    "load", "requests", "server", "first token, ms: median", "p99",
    "between tokens, ms: median", "p99", "output tokens/s", "ours ÷ theirs",
)  # fmt: skip


def serving_table(rows: Sequence[Row]) -> list[str]:
    """A line for each load and server; the ratio is that of output tokens a second."""
    newest: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: str(row.get("date"))):
        if row.get("bench") == "serving_peers" and can_carry_a_claim(row):
            newest[(f"{row['shape']}, {row['work']}", row["subject"])] = row
    if not newest:
        return ["No row yet."]
    parts = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for load in dict.fromkeys(load for load, _ in newest):
        sides = {subject: row for (name, subject), row in newest.items() if name == load}
        for subject, row in sides.items():
            parts.append(f"| {' | '.join(_cells(load, subject, row, sides))} |")
    return [*parts, "", provenance_line(list(newest.values()))]


def _cells(load: str, subject: str, row: Row, sides: dict[str, Row]) -> list[str]:
    first, between = row["first_token_ms"], row["between_pieces_ms"]
    values = (
        first["median"], first["p99"], between["median"], between["p99"],
        row["output_tokens_per_s"],
    )  # fmt: skip
    peers = [float(each["output_tokens_per_s"]) for name, each in sides.items() if name != OURS]
    ratio = ""
    if subject == OURS and peers:
        ratio = f"**{ratio_number(float(row['output_tokens_per_s']) / max(peers))}**"
    about = [load, str(row["requests"])] if subject == next(iter(sides)) else ["", ""]
    return [*about, subject, *map(number, values), ratio]
