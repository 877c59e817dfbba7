"""``python -m tools.readme_chart``: draw docs/img/readme-speed.svg from the rows, or ``--check``.

Six works, modelmill beside vLLM, from the rows that the table of docs/performance.md takes: both
sides in turn on one card, commit and card named, the newest run of each card. The value of a side
is the median over the cards, the ratio the median of the cards' ratios.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from xml.sax.saxutils import escape

from tools import generated_page
from tools.performance.numbers import count_range
from tools.performance.rows import OURS, Row, read_rows
from tools.performance.runs import H200, Summary
from tools.performance.vllm_tables import PEER, vllm_summaries

CHART = Path("docs/img/readme-speed.svg")
RESULTS = Path("benchmarks/results/h200.jsonl")
MODEL = "Qwen-7B's shape, bfloat16"
WORKS = {
    "decode-1x128": "1 stream, context 128, per token",
    "decode-8x1024": "8 streams, context 1,024, per step",
    "decode-64x1024": "64 streams, context 1,024, per step",
    "first-1024": "prompt of 1,024, first token",
    "first-4096": "prompt of 4,096, first token",
    "trace-500": "500 requests of a trace, in order of arrival",
}
COLORS = {OURS: "#1f77b4", PEER: "#b8bec4"}
UNITS = {"ms/token": "ms", "ms/step": "ms"}
WIDTH, LABEL_WIDTH, BAR_WIDTH, BAR_HEIGHT, PAIR_HEIGHT = 760, 290, 330, 13, 38
EDGE = 8


def chart_summaries(rows: Iterable[Row]) -> dict[str, Summary]:
    """The works of the chart that have rows, in its order."""
    summaries = vllm_summaries(rows)
    return {work: summaries[work] for work in WORKS if work in summaries}


def caption(summaries: Mapping[str, Summary]) -> str:
    """One line: geometric mean of the works' ratios, the least favourable run, cards of a work."""
    ratio = geometric_mean(summary.ratio for summary in summaries.values())
    least = min(summary.worst.ratio for summary in summaries.values())
    cards = count_range([len(summary.runs) for summary in summaries.values()])
    return (
        f"geometric mean {ratio:.2f}× as fast, the least favourable run {least:.2f}×; "
        f"times and ratios are medians over {cards} cards"
    )


def draw(summaries: Mapping[str, Summary]) -> str:
    """The chart as SVG: bars of time relative to the slower side, with the times beside them."""
    title = f"{MODEL}, one {H200}: time, shorter is faster"
    parts = [_text(EDGE, 16, title, "bold")]
    for side, x in ((OURS, LABEL_WIDTH), (PEER, LABEL_WIDTH + 110)):
        parts += [_bar(x, 27, 12, 12, COLORS[side]), _text(x + 18, 37, side)]
    for index, (work, summary) in enumerate(summaries.items()):
        parts += _pair(52 + index * PAIR_HEIGHT, work, summary)
    height = 52 + len(summaries) * PAIR_HEIGHT + 20
    if summaries:
        parts.append(_text(EDGE, height - 6, caption(summaries)))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def _pair(top: float, work: str, summary: Summary) -> list[str]:
    """The two bars of a work, with its label and times."""
    parts = [_text(LABEL_WIDTH - 10, top + 17, WORKS[work], anchor="end")]
    values = {OURS: summary.engine_value, PEER: summary.peer_value}
    unit = str(summary.runs[0].engine["unit"])
    for line, (side, value) in enumerate(values.items()):
        y = top + line * (BAR_HEIGHT + 1)
        width = BAR_WIDTH * value / max(values.values())
        label = f"{value:.3g} {UNITS.get(unit, unit)}"
        if side == OURS:
            label += f"  ({summary.ratio:.2f}× as fast)"
        parts.append(_bar(LABEL_WIDTH, y, width, BAR_HEIGHT, COLORS[side]))
        parts.append(_text(LABEL_WIDTH + width + 6, y + 11, label))
    return parts


def _text(x: float, y: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}"'
    return f"<text {place}>{escape(text)}</text>"


def _bar(x: float, y: float, width: float, height: float, color: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{color}"/>'


def chart(root: Path) -> dict[Path, str]:
    """The chart by its path, as the rows below a root give it."""
    return {CHART: draw(chart_summaries(read_rows(root / RESULTS)))}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the chart; with ``--check`` only say whether it is stale."""
    return generated_page.run_pages(argv, __doc__, "performance", chart)


if __name__ == "__main__":
    sys.exit(main())
