"""The page: the story with its marks replaced by tables and plots that the rows give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.performance import plots, tables
from tools.performance.cards_table import cards_table
from tools.performance.minigpt4_table import minigpt4_table
from tools.performance.ops_table import ops_table
from tools.performance.rows import Row, read_rows
from tools.performance.sam_table import sam_table

STORY, PAGE = Path("docs/performance.story.md"), Path("docs/performance.md")
RESULTS, IMAGES = Path("benchmarks/results"), Path("docs/img")
NOTE = (
    "<!-- Made by `make performance` from performance.story.md and benchmarks/results: change "
    "those. -->"
)


@dataclass(frozen=True)
class PlotSpec:
    """One drawn file. device: whose rows; data: what it shows."""

    device: str
    data: Callable[[Sequence[Row]], plots.Bars]
    plot_type: str
    title: str
    axis: str
    target: float | None = None


PLOTS: Mapping[str, PlotSpec] = {
    "speed": PlotSpec(
        "h200",
        plots.speed,
        "dots",
        "Time over what must be reached",
        "time / must (less is better)",
        1.0,
    ),
    "ideas": PlotSpec(
        "h200",
        plots.code_states,
        "bars",
        "Before and after",
        "over the first of its group (less is better)",
        1.0,
    ),
    "kernels": PlotSpec(
        "h200",
        plots.fractions,
        "bars",
        "Kernels bound by memory, bfloat16",
        "share of the copy bandwidth",
        1.0,
    ),
    "products": PlotSpec(
        "h200", plots.rates, "bars", "Kernels bound by products, bfloat16", "TFLOP/s"
    ),
    "cpu": PlotSpec(
        "cpu", plots.cpu, "bars", "On two CPU cores", "times llama.cpp (more is better)", 1.0
    ),
}
TABLES: Mapping[str, tuple[str, Callable[[Sequence[Row]], list[str]]]] = {
    "speed": ("h200", tables.speed_table),
    "conditions": ("h200", tables.conditions_table),
    "kernels": (
        "h200",
        lambda rows: tables.bars_table(plots.fractions(rows), ("kernel and case", "share of copy")),
    ),
    "products": (
        "h200",
        lambda rows: tables.bars_table(plots.rates(rows), ("kernel and case", "TFLOP/s")),
    ),
    "ideas": (
        "h200",
        lambda rows: tables.bars_table(plots.code_states(rows), ("state of the code", "time")),
    ),
    "gpus": ("h200", tables.gpus_table),
    "cards": ("h200", cards_table),
    "ops": ("h200", ops_table),
    "pictures": ("h200", minigpt4_table),
    "segmenting": ("h200", sam_table),
    "cpu": ("cpu", tables.cpu_table),
}
_PLACEHOLDER = re.compile(r"^\{\{ *(table|plot) +(\w+) *\}\}$", re.MULTILINE)


def read_device_rows(root: Path) -> dict[str, list[Row]]:
    """The rows by device."""
    return {name: read_rows(root / RESULTS / f"{name}.jsonl") for name in ("h200", "cpu")}


def render(story: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """The page's text. Raises ValueError naming a mark that nothing is known of."""

    def replaced(mark: re.Match[str]) -> str:
        item_type, name = mark.groups()
        if item_type == "table" and name in TABLES:
            device, table = TABLES[name]
            return "\n".join(table(rows[device]))
        if item_type == "plot" and name in PLOTS:
            return f"![{PLOTS[name].title}](img/{plot_path(name).name})"
        raise ValueError(f"{STORY}: nothing is known of {mark.group(0)}")

    return f"{NOTE}\n\n" + _PLACEHOLDER.sub(replaced, story).strip() + "\n"


def plot_path(name: str) -> Path:
    """Where a plot is written."""
    return IMAGES / f"performance-{name}.svg"


def _plots(story: str) -> list[str]:
    return [
        name
        for item_type, name in _PLACEHOLDER.findall(story)
        if item_type == "plot" and name in PLOTS
    ]


def stale_files(root: Path) -> list[str]:
    """Files that are not what rows and story give; a plot is known by the digest of its data."""
    story, rows = (root / STORY).read_text(encoding="utf-8"), read_device_rows(root)
    stale = []
    page = root / PAGE
    if not page.exists() or page.read_text(encoding="utf-8") != render(story, rows):
        stale.append(str(PAGE))
    for name in _plots(story):
        plot = PLOTS[name]
        if plots.file_digest(root / plot_path(name)) != plots.digest(plot.data(rows[plot.device])):
            stale.append(str(plot_path(name)))
    return stale


def write(root: Path) -> list[str]:
    """Write what is stale; the names written."""
    old = stale_files(root)
    story, rows = (root / STORY).read_text(encoding="utf-8"), read_device_rows(root)
    for name in _plots(story):
        if str(plot_path(name)) in old:
            plot = PLOTS[name]
            data = plot.data(rows[plot.device])
            plots.draw_svg(
                root / plot_path(name), data, plot.plot_type, plot.title, plot.axis, plot.target
            )
    if str(PAGE) in old:
        (root / PAGE).write_text(render(story, rows), encoding="utf-8")
    return old
