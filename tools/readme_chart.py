"""``python -m tools.readme_chart``: draw docs/img/readme-speed.svg from the rows, or ``--check``.

Six works, modelmill beside vLLM. A pair comes from runs that timed both sides in turn on one card
and have a commit; the value of a side is the median over the cards, the ratio the median of the
cards' ratios.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.sax.saxutils import escape

from tools import generated_page
from tools.performance.rows import Row, read_rows

CHART = Path("docs/img/readme-speed.svg")
RESULTS = Path("benchmarks/results/h200.jsonl")
DEVICE, MODEL = "NVIDIA H200", "Qwen-7B's shape, bfloat16"
WORKS = {
    "decode-1x128": "1 stream, per token",
    "decode-8x1024": "8 streams, context 1,024, per step",
    "decode-64x1024": "64 streams, context 1,024, per step",
    "first-1024": "prompt of 1,024, first token",
    "first-4096": "prompt of 4,096, first token",
    "trace-500": "500 requests of a trace, in order of arrival",
}
OURS, PEER = "modelmill", "vLLM"
COLORS = {OURS: "#1f77b4", PEER: "#b8bec4"}
UNITS = {"ms/token": "ms", "ms/step": "ms"}
WIDTH, LABEL_WIDTH, BAR_WIDTH, BAR_HEIGHT, PAIR_HEIGHT = 760, 290, 330, 13, 38


@dataclass(frozen=True)
class Pair:
    """A work's median times over the cards, and the ratio peer / ours of each run."""

    work: str
    values: dict[str, float]
    unit: str
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the runs' ratios: above 1, modelmill is faster."""
        return median(self.ratios)


def read_pairs(rows: Iterable[Row]) -> list[Pair]:
    """The works that both sides ran in turn on one card."""
    by_work: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        if row.get("device") != DEVICE or "commit" not in row or row.get("work") not in WORKS:
            continue
        if row.get("subject") in (OURS, PEER):
            by_work.setdefault(row["work"], {}).setdefault(row["run"], {})[row["subject"]] = row
    pairs = []
    for work in WORKS:
        runs = [
            sides
            for sides in by_work.get(work, {}).values()
            if len(sides) == 2 and (work != "trace-500" or _in_arrival_order(sides[OURS]))
        ]
        if not runs:
            continue
        values = {
            side: median(float(sides[side]["value"]) for sides in runs) for side in (OURS, PEER)
        }
        ratios = tuple(sorted(sides[PEER]["value"] / sides[OURS]["value"] for sides in runs))
        unit = str(runs[0][OURS]["unit"])
        pairs.append(Pair(work, values, UNITS.get(unit, unit), ratios))
    return pairs


def _in_arrival_order(row: Row) -> bool:
    """Whether the trace was served as it arrived; older rows say so in a note."""
    return row.get("order") == "arrival" or "order of arrival" in row.get("note", "")


def draw(pairs: Sequence[Pair]) -> str:
    """The chart as SVG: bars of time relative to the slower side, with the times beside them."""
    title = f"{MODEL}, one {DEVICE}: time, shorter is faster"
    parts = [_text(0, 16, title, "bold")]
    for side, x in ((OURS, LABEL_WIDTH), (PEER, LABEL_WIDTH + 110)):
        parts += [_bar(x, 27, 12, 12, COLORS[side]), _text(x + 18, 37, side)]
    for index, pair in enumerate(pairs):
        top = 52 + index * PAIR_HEIGHT
        longest = max(pair.values.values())
        parts.append(_text(LABEL_WIDTH - 10, top + 17, WORKS[pair.work], anchor="end"))
        for line, side in enumerate((OURS, PEER)):
            y = top + line * (BAR_HEIGHT + 1)
            width = BAR_WIDTH * pair.values[side] / longest
            label = f"{pair.values[side]:.3g} {pair.unit}"
            if side == OURS:
                label += f"  ({pair.ratio:.2f}× as fast)"
            parts.append(_bar(LABEL_WIDTH, y, width, BAR_HEIGHT, COLORS[side]))
            parts.append(_text(LABEL_WIDTH + width + 6, y + 11, label))
    height = 52 + len(pairs) * PAIR_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _bar(x: float, y: float, width: float, height: float, color: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{color}"/>'


def chart(root: Path) -> dict[Path, str]:
    """The chart by its path, as the rows below a root give it."""
    return {CHART: draw(read_pairs(read_rows(root / RESULTS)))}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the chart; with ``--check`` only say whether it is stale."""
    return generated_page.run_pages(argv, __doc__, "performance", chart)


if __name__ == "__main__":
    sys.exit(main())
