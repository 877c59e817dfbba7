"""The table of recipes on held-back texts of several kinds: mean and worst of each build."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.performance.rows import read_rows
from tools.performance.runs import can_carry_a_claim

RESULTS = Path("benchmarks/results/quantization_texts.jsonl")
Row = Mapping[str, Any]


def newest(file: Path) -> list[Row]:
    """Return the newest row of each build on each kind of text, as the file has them.

    Rows without a commit or host, or of code with local changes, are refused.
    """
    rows = filter(can_carry_a_claim, read_rows(file))
    return list({(_build(row), row["kind"]): row for row in rows}.values())


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown lines: a build a line, a kind of text a column; the least worst first.

    Mean and worst are of the kinds that every build was judged on, so that they are comparable.
    """
    text_kinds = list(dict.fromkeys(row["kind"] for row in rows))
    builds, shared = _costs(rows)
    lines = [
        f"| build | {' | '.join(text_kinds)} | mean | worst |",
        "|---|" + "---|" * (len(text_kinds) + 2),
    ]

    def worst(build: str) -> float:
        return max((builds[build][each] for each in shared), default=0.0)

    for build in sorted(builds, key=worst):
        costs = builds[build]
        cells = [f"{costs[each]:+.2f} %" if each in costs else "" for each in text_kinds]
        mean = sum(costs[each] for each in shared) / len(shared) if shared else 0.0
        cells += [f"{mean:+.2f} %", f"**{worst(build):+.2f} %**"] if shared else ["", ""]
        lines.append(f"| {build} | {' | '.join(cells)} |")
    return lines


def mean_and_worst(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Per cent over float32 on the kinds that every build was judged on, by a build's options."""
    builds, shared = _costs(rows)
    options = {_build(row): str(row["options"] or "-q none") for row in rows if not row.get("note")}
    return {
        options[build]: (
            sum(costs[each] for each in shared) / len(shared),
            max(costs[each] for each in shared),
        )
        for build, costs in builds.items()
        if build in options and shared
    }


def _costs(rows: Sequence[Row]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Per cent over float32 by build and kind, and the kinds that every build was judged on."""
    builds: dict[str, dict[str, float]] = {}
    for row in rows:
        # + 0.0: no "-0.00 %"
        builds.setdefault(_build(row), {})[row["kind"]] = round(100 * row["excess"], 2) + 0.0
    text_kinds = dict.fromkeys(row["kind"] for row in rows)
    return builds, [each for each in text_kinds if all(each in costs for costs in builds.values())]


def sources(rows: Sequence[Row]) -> list[str]:
    """Markdown lines: what each kind of text is, with the hash of its file."""
    lines = ["| kind | text | tokens | float32 | SHA-256 |", "|---|---|---|---|---|"]
    for row in {row["kind"]: row for row in rows}.values():
        skipped = f", behind the first {row['skip']:,} tokens" if row.get("skip") else ""
        lines.append(
            f"| {row['kind']} | `{row['text']}`{skipped} | {row['tokens']:,} | "
            f"{row['float32']:.3f} | `{row['text_sha256'][:12]}` |"
        )
    return lines


def _build(row: Row) -> str:
    note = f" ({row['note']})" if row.get("note") else ""
    return f"`{row['options'] or '-q none'}`{note}"
