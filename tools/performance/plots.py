"""The page's plots: as plain data first, then as an SVG that contains the data's digest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.targets import TARGETS
from tools.performance.numbers import number
from tools.performance.rows import (
    Row,
    cpu_groups,
    kernels,
    make_target_line,
    row_unit,
    rows_by_state,
)

Bars = Sequence[tuple[str, Mapping[str, float]]]
"""(label, value by series) from top to bottom."""
BIG_RATIO = 0.2
"""Kernels that reach less than this share of the ceiling on a case are bound by their launch: not
shown.
"""
FAST_RATIO = 50
"""TFLOP/s.

Cases that no variant brings here are too small for the tensor cores: not shown.
"""
DRAWING_VERSION = 4
"""To be raised where this file draws the same data in another way: files drawn before are then
stale.
"""
_COLOURS = {
    "floor": "#999999", "must": "#c0392b", "dream": "#e67e22", "modelmill": "#1f77b4",
    "vLLM": "#2ca02c",
    "transformers": "#9467bd", "llama.cpp": "#2ca02c", "first": "#aec7e8",
}  # fmt: skip


def speed(rows: Sequence[Row]) -> Bars:
    """Every line of the speed table: floor, ours and the peer over what must be reached."""
    bars = []
    for work, target in TARGETS.items():
        line = make_target_line(work, rows)
        if line.newest is None:
            continue
        values = {
            "modelmill": line.newest.value / target.required,
            "dream": target.stretch_goal / target.required,
        }
        if target.floor is not None:
            values["floor"] = target.floor / target.required
        if (
            line.first is not None
            and line.first is not line.newest
            and line.first.row["date"] != line.newest.row["date"]
        ):
            values["first"] = line.first.value / target.required
        if line.beside_peer is not None:
            values |= {
                name: each.value / target.required
                for name, each in line.peers.items()
                if name in _COLOURS
            }
        bars.append((target.title, values))
    return bars


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


def fractions(rows: Sequence[Row]) -> Bars:
    """Return the bandwidth share of every bfloat16 kernel on its memory-bound cases."""
    bars: dict[str, dict[str, float]] = {}
    for row in kernels(rows):
        if (
            row["dtype"] == "bfloat16"
            and row.get("fraction", 0.0) >= BIG_RATIO
            and not _is_compute_bound(row)
        ):
            bars.setdefault(f"{row['op']} {row['case']}", {})[row["variant"]] = row["fraction"]
    return list(bars.items())


def rates(rows: Sequence[Row]) -> Bars:
    """TFLOP/s of the bfloat16 kernels on the cases that are bound by products."""
    bars: dict[str, dict[str, float]] = {}
    for row in kernels(rows):
        if row["dtype"] == "bfloat16" and _is_compute_bound(row) and row["tflops"] >= FAST_RATIO:
            bars.setdefault(f"{row['op']} {row['case']}", {})[row["variant"]] = row["tflops"]
    return list(bars.items())


def _is_compute_bound(row: Row) -> bool:
    """Whether products set the floor.

    Older rows do not say: there more than 100 TFLOP/s is the criterion.
    """
    if "bound" in row:
        return bool(row["bound"] == "products")
    return (row.get("tflops") or 0) > 100


def cpu(rows: Sequence[Row]) -> Bars:
    """Ours over llama.cpp by engine and work."""
    return [
        (f"{engine.replace('`', '')}: {work}", {"modelmill": pair.after["ratio"]})
        for engine, works in cpu_groups(rows).items()
        for work, pair in works.items()
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


def draw_svg(
    path: Path, bars: Bars, plot_type: str, title: str, axis: str, target: float | None = None
) -> None:
    """Write an SVG, byte-identical for the same data.

    plot_type: "dots" or "bars"; target: a line across all.

    Raises ImportError without matplotlib (``pip install 'modelmill[report]'``).
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
        (_dots if plot_type == "dots" else _bars)(axes, bars)
        if target is not None:
            axes.axvline(target, color=_COLOURS["must"], linewidth=1)
        axes.set_yticks(range(len(bars)), [label for label, _ in bars])
        for label, (_, values) in zip(axes.get_yticklabels(), bars, strict=True):
            label.set_fontweight("normal" if values else "bold")
        axes.set_ylim(-0.7, len(bars) - 0.3)
        axes.invert_yaxis()
        axes.set_title(title)
        axes.set_xlabel(axis)
        axes.grid(axis="x", alpha=0.3)
        path.parent.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"Date": None, "Description": f"data {digest(bars)}"}
        figure.savefig(path, metadata=about, facecolor="white")
        pyplot.close(figure)


def _dots(axes: Any, bars: Bars) -> None:
    markers = {"floor": "|", "dream": "|"}
    for name in dict.fromkeys(name for _, values in bars for name in values):
        places = [(values[name], line) for line, (_, values) in enumerate(bars) if name in values]
        axes.scatter(
            [x for x, _ in places], [y for _, y in places], label=name, color=_COLOURS.get(name),
            zorder=3,
            marker=markers.get(name, "o"), s=90 if name in markers else 36,
        )  # fmt: skip
    axes.set_xlim(left=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _bars(axes: Any, bars: Bars) -> None:
    names = list(dict.fromkeys(name for _, values in bars for name in values))
    height = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        for line, (_, values) in enumerate(bars):
            if name in values:
                y = line + (place - (len(names) - 1) / 2) * height
                drawn = axes.barh(y, values[name], height, color=f"C{place}", label=name)
                axes.bar_label(drawn, labels=[number(values[name])], padding=2, fontsize=7)
    axes.margins(x=0.1)  # for the numbers
    if len(names) > 1:
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axes.legend(once.values(), once.keys(), loc="best")
