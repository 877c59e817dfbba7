"""The page's plots: as plain data first, then as an SVG that contains the data's digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.performance.numbers import number
from tools.performance.rows import Row, row_unit, rows_by_state
from tools.performance.suite_tables import mean_ratio, suite_lines
from tools.performance.vllm_tables import WORKLOADS, vllm_summaries

Bars = Sequence[tuple[str, Mapping[str, float]]]
"""(label, value by series) from top to bottom."""
DRAWING_VERSION = 6
"""To be raised where this file draws the same data in another way: files drawn before are then
stale.
"""
TARGET_COLOUR = "#c0392b"


def speed(rows: Sequence[Row]) -> Bars:
    """How many times as fast as vLLM: the median over the cards, and the least favourable run."""
    return [
        (
            WORKLOADS[work],
            {"median over cards": summary.ratio, "least favourable run": summary.worst.ratio},
        )
        for work, summary in vllm_summaries(rows).items()
    ]


def code_states(rows: Sequence[Row]) -> Bars:
    """Return every code state relative to the first of its group; labels give the figure."""
    groups: list[tuple[str, Mapping[str, float]]] = []
    for (_, work), group in rows_by_state(rows).items():
        groups.append((work, {}))
        for row in group:
            order = f", order {row['order']}" if "order" in row else ""
            label = f"{row['state']}{order}: {row['value']:.4g} {row_unit(row)}".rstrip()
            groups.append((label, {"over the first": row["value"] / group[0]["value"]}))
    return groups


def suite(rows: Sequence[Row]) -> Bars:
    """How many times as fast as the fastest peer of the same run: means by device and shape."""
    return [
        (
            f"{shape}, {device}",
            {
                label: ratio
                for label, start in {"decode": "decode", "first token": "first"}.items()
                if (ratio := mean_ratio(lines, start)) is not None
            },
        )
        for (device, shape), lines in suite_lines(rows).items()
        if any(line.ratios for line in lines)
    ]


def digest(bars: Bars) -> str:
    """Return a digest of the data and of the drawing code's version."""
    content = json.dumps([DRAWING_VERSION, [[label, dict(values)] for label, values in bars]])
    return hashlib.sha256(content.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The digest that a drawn file carries; empty where there is none."""
    if not path.exists():
        return ""
    match = re.search(r"data ([0-9a-f]{64})", path.read_text(encoding="utf-8"))
    return match.group(1) if match else ""


def draw_svg(path: Path, bars: Bars, title: str, axis: str, target: float | None = None) -> None:
    """Write an SVG of bars, byte-identical for the same data.

    target: a line across all.

    Raises ImportError without matplotlib (the extra ``report``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "svg.hashsalt": "modelmill",
        "svg.fonttype": "none",
        "font.size": 9,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(
            figsize=(9, 0.8 + 0.28 * max(len(bars), 3)), layout="constrained"
        )
        _draw_bars(axes, bars)
        if target is not None:
            axes.axvline(target, color=TARGET_COLOUR, linewidth=1)
        axes.set_yticks(range(len(bars)), [label for label, _ in bars])
        for label, (_, values) in zip(axes.get_yticklabels(), bars, strict=True):
            label.set_fontweight("normal" if values else "bold")
        axes.set_ylim(-0.7, len(bars) - 0.3)
        axes.invert_yaxis()
        axes.set_title(title)
        axes.set_xlabel(axis)
        axes.grid(axis="x", alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        if len(once := dict(zip(labels, handles, strict=True))) > 1:
            figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=len(once))
        path.parent.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"Date": None, "Description": f"data {digest(bars)}"}
        figure.savefig(path, metadata=about, facecolor="white")
        pyplot.close(figure)


def _draw_bars(axes: Any, bars: Bars) -> None:
    names = list(dict.fromkeys(name for _, values in bars for name in values))
    height = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        for line, (_, values) in enumerate(bars):
            if name in values:
                y = line + (place - (len(names) - 1) / 2) * height
                drawn = axes.barh(y, values[name], height, color=f"C{place}", label=name)
                axes.bar_label(drawn, labels=[number(values[name])], padding=2, fontsize=7)
    axes.margins(x=0.1)  # for the numbers
