"""The page: the story with its marks replaced by tables and plots that the rows give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.performance import plots, tables
from tools.performance.cards import cards
from tools.performance.every_op import every_op
from tools.performance.pictures import pictures
from tools.performance.rows import Row, read_rows
from tools.performance.segmenting import segmenting

STORY, PAGE = Path("docs/performance.story.md"), Path("docs/performance.md")
RESULTS, IMAGES = Path("benchmarks/results"), Path("docs/img")
NOTE = "<!-- Made by `make performance` from performance.story.md and benchmarks/results: change those. -->"


@dataclass(frozen=True)
class Plot:
    """One drawn file. device: whose rows; data: what it shows."""

    device: str
    data: Callable[[Sequence[Row]], plots.Bars]
    kind: str
    title: str
    axis: str
    mark: float | None = None


PLOTS: Mapping[str, Plot] = {
    "speed": Plot("h200", plots.speed, "dots", "Time over what must be reached", "time / must (less is better)", 1.0),
    "ideas": Plot(
        "h200", plots.states, "bars", "Before and after", "over the first of its group (less is better)", 1.0
    ),
    "kernels": Plot(
        "h200", plots.fractions, "bars", "Kernels bound by memory, bfloat16", "share of the copy bandwidth", 1.0
    ),
    "products": Plot("h200", plots.rates, "bars", "Kernels bound by products, bfloat16", "TFLOP/s"),
    "cpu": Plot("cpu", plots.cpu, "bars", "On two CPU cores", "times llama.cpp (more is better)", 1.0),
}
TABLES: Mapping[str, tuple[str, Callable[[Sequence[Row]], list[str]]]] = {
    "speed": ("h200", tables.speed),
    "conditions": ("h200", tables.conditions),
    "kernels": ("h200", lambda rows: tables.bars(plots.fractions(rows), ("kernel and case", "share of copy"))),
    "products": ("h200", lambda rows: tables.bars(plots.rates(rows), ("kernel and case", "TFLOP/s"))),
    "ideas": ("h200", lambda rows: tables.bars(plots.states(rows), ("state of the code", "time"))),
    "gpus": ("h200", tables.gpus),
    "cards": ("h200", cards),
    "ops": ("h200", every_op),
    "pictures": ("h200", pictures),
    "segmenting": ("h200", segmenting),
    "cpu": ("cpu", tables.cpu),
}
_MARK = re.compile(r"^\{\{ *(table|plot) +(\w+) *\}\}$", re.MULTILINE)


def read(root: Path) -> dict[str, list[Row]]:
    """The rows by device."""
    return {name: read_rows(root / RESULTS / f"{name}.jsonl") for name in ("h200", "cpu")}


def render(story: str, rows: Mapping[str, Sequence[Row]]) -> str:
    """The page's text. Raises ValueError naming a mark that nothing is known of."""

    def replaced(mark: re.Match[str]) -> str:
        kind, name = mark.groups()
        if kind == "table" and name in TABLES:
            device, table = TABLES[name]
            return "\n".join(table(rows[device]))
        if kind == "plot" and name in PLOTS:
            return f"![{PLOTS[name].title}](img/{file_of(name).name})"
        raise ValueError(f"{STORY}: nothing is known of {mark.group(0)}")

    return f"{NOTE}\n\n" + _MARK.sub(replaced, story).strip() + "\n"


def file_of(name: str) -> Path:
    """Where a plot is written."""
    return IMAGES / f"performance-{name}.svg"


def _plots(story: str) -> list[str]:
    return [name for kind, name in _MARK.findall(story) if kind == "plot" and name in PLOTS]


def stale(root: Path) -> list[str]:
    """Files that are not what rows and story give; a plot is known by the digest of its data."""
    story, rows = (root / STORY).read_text(encoding="utf-8"), read(root)
    found = []
    page = root / PAGE
    if not page.exists() or page.read_text(encoding="utf-8") != render(story, rows):
        found.append(str(PAGE))
    for name in _plots(story):
        plot = PLOTS[name]
        if plots.digest_of(root / file_of(name)) != plots.digest(plot.data(rows[plot.device])):
            found.append(str(file_of(name)))
    return found


def write(root: Path) -> list[str]:
    """Write what is stale; the names written."""
    old = stale(root)
    story, rows = (root / STORY).read_text(encoding="utf-8"), read(root)
    for name in _plots(story):
        if str(file_of(name)) in old:
            plot = PLOTS[name]
            data = plot.data(rows[plot.device])
            plots.draw(root / file_of(name), data, plot.kind, plot.title, plot.axis, plot.mark)
    if str(PAGE) in old:
        (root / PAGE).write_text(render(story, rows), encoding="utf-8")
    return old
