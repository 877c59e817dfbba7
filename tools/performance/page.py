"""docs/performance.md and bench.md: a template's marks replaced by what the rows give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.performance import (
    gpu_tables,
    notes_index,
    plots,
    serving_tables,
    suite_tables,
    vllm_tables,
)
from tools.performance.provenance import without_ages
from tools.performance.rows import Row, read_rows

TEMPLATE, PAGE = Path("tools/performance/page.template.md"), Path("docs/performance.md")
PAGES = {PAGE: TEMPLATE, Path("docs/bench.md"): Path("tools/performance/bench.template.md")}
SUITE = "suite"
RESULTS, IMAGES = Path("benchmarks/results"), Path("docs/img")


@dataclass(frozen=True)
class PlotSpec:
    """One drawn file. device: whose rows; data: what it shows; target: a line across all."""

    device: str
    data: Callable[[Sequence[Row]], plots.Bars]
    title: str
    axis: str
    target: float | None = 1.0


PLOTS: Mapping[str, PlotSpec] = {
    "speed": PlotSpec("h200", plots.speed, "Beside vLLM on an H200", "times as fast"),
    "ideas": PlotSpec(
        "h200",
        plots.code_states,
        "Before and after",
        "over the first of its group (less is better)",
    ),
    "suite": PlotSpec(
        SUITE,
        plots.suite,
        "Beside the fastest peer of each device",
        "times as fast, geometric mean over the works",
    ),
}
TABLES: Mapping[str, tuple[str, Callable[[Sequence[Row]], list[str]]]] = {
    "vllm": ("h200", vllm_tables.vllm_table),
    "fastest_peer": ("h200", gpu_tables.fastest_peer_table),
    "alone": ("h200", gpu_tables.alone_table),
    "parallel": ("h200", gpu_tables.parallel_table),
    "suite": (SUITE, suite_tables.suite_table),
    "serving": ("serving", serving_tables.serving_table),
    "suite_summary": (SUITE, suite_tables.suite_summary),
}
_MARK = re.compile(r"^\{\{ *(table|plot) +(\w+) *\}\}$", re.MULTILINE)


def read_device_rows(root: Path) -> dict[str, list[Row]]:
    """The rows by file; those of ``make bench``, one file a device, under ``SUITE``."""
    by_file = {path.stem: read_rows(path) for path in sorted((root / RESULTS).glob("*.jsonl"))}
    suite = [row for rows in by_file.values() for row in rows if row.get("bench") == SUITE]
    return {"h200": [], "serving": [], **by_file, SUITE: suite}


def render(template: str, rows: Mapping[str, Sequence[Row]], source: Path = TEMPLATE) -> str:
    """The page's text. Raises ValueError naming a mark that nothing is known of.

    source: where the template is.
    """

    def replaced(mark: re.Match[str]) -> str:
        item_type, name = mark.groups()
        if item_type == "table" and name in TABLES:
            device, table = TABLES[name]
            return "\n".join(table(rows[device]))
        if item_type == "plot" and name in PLOTS:
            return f"![{PLOTS[name].title}](img/{plot_path(name).name})"
        raise ValueError(f"{source}: nothing is known of {mark.group(0)}")

    return f"{made_from(source)}\n\n" + _MARK.sub(replaced, template).strip() + "\n"


def made_from(source: Path) -> str:
    """The comment at the head of a page."""
    return f"<!-- Made by `make performance` from {source} and {RESULTS}: change those. -->"


def plot_path(name: str) -> Path:
    """Where a plot is written."""
    return IMAGES / f"performance-{name}.svg"


def _texts(root: Path, rows: Mapping[str, Sequence[Row]]) -> dict[Path, str]:
    """The pages that the tool writes, by their path."""
    pages = {
        page: render((root / template).read_text(encoding="utf-8"), rows, template)
        for page, template in PAGES.items()
    }
    return {**pages, notes_index.PAGE: notes_index.render(root)}


def stale_files(root: Path) -> list[str]:
    """Files that are not what template, notes and rows give; a plot has its data's digest.

    Ages of commits are left out: they change with every commit.
    """
    rows = read_device_rows(root)
    stale = [
        str(path)
        for path, text in _texts(root, rows).items()
        if not (root / path).exists()
        or without_ages((root / path).read_text(encoding="utf-8")) != without_ages(text)
    ]
    for name, plot in PLOTS.items():
        if plots.file_digest(root / plot_path(name)) != plots.digest(plot.data(rows[plot.device])):
            stale.append(str(plot_path(name)))
    return stale


def write(root: Path) -> list[str]:
    """Write what is stale, and pages whose ages are; the names written."""
    old = stale_files(root)
    rows = read_device_rows(root)
    written = []
    for path, text in _texts(root, rows).items():
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
            written.append(str(path))
    for name, plot in PLOTS.items():
        if str(plot_path(name)) in old:
            data = plot.data(rows[plot.device])
            plots.draw_svg(root / plot_path(name), data, plot.title, plot.axis, plot.target)
            written.append(str(plot_path(name)))
    return written
