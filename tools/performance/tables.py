"""The page's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.targets import CPU_MUST, TARGETS, Target
from tools.performance.plots import Bars
from tools.performance.rows import Line, Measured, Pair, Row, cpu_groups, line_of


def speed(rows: Sequence[Row]) -> list[str]:
    """Every line of the speed targets: floor, must, first, now, and the peer of the same run."""
    head = ["| work | unit | floor | must | first measured | ours now | | peer, same run | × ours |"]
    lines = [*head, "|---|---|---|---|---|---|---|---|---|"]
    for work, target in TARGETS.items():
        lines.append("| " + " | ".join(_speed_cells(target, line_of(work, rows))) + " |")
    return lines


def _speed_cells(target: Target, line: Line) -> list[str]:
    ours, first = line.ours, line.first
    same = first is None or ours is None or first.row["date"] == ours.row["date"]
    floor = "–" if target.floor is None else f"{target.floor:g}"
    cells = [target.title, target.unit, floor, f"{target.must:g}", "–" if same else number(first.value)]  # type: ignore[union-attr]
    if ours is None:
        return [*cells, "not measured", "", "–", ""]
    reached = "dream" if ours.value <= target.dream else "reached" if ours.value <= target.must else "missed"
    peers = [f"{_named(name, each)} {spread(each)}" for name, each in line.peers.items()]
    ratios = [f"**{each.value / ours.value:.2f}**" for each in line.peers.values()]
    return [*cells, f"**{number(ours.value)}**{_range(ours)}", reached, "; ".join(peers) or "–", ", ".join(ratios)]


def _named(name: str, measured: Measured) -> str:
    version = measured.row.get("versions", {}).get(name.lower())
    return f"{name} {version}:" if version else f"{name}:"


def spread(measured: Measured) -> str:
    """4.21 (4.20 … 4.23)."""
    return number(measured.value) + _range(measured)


def _range(measured: Measured) -> str:
    least, most = measured.least, measured.most
    if least is None or most is None or (measured.runs or 1) < 2 or number(least) == number(most):
        return ""
    return f" ({number(least)} … {number(most)})"


def number(value: float) -> str:
    """Three digits that count; whole from 1,000 on."""
    if value >= 1000:
        return f"{value:,.0f}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def conditions(rows: Sequence[Row]) -> list[str]:
    """The runs that the speed table's newest figures come from: command, device, versions, date."""
    found: dict[str, list[str]] = {}
    for work, target in TARGETS.items():
        ours = line_of(work, rows).ours
        if ours is not None:
            row = ours.row
            versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if name != "numpy")
            told = f"`{row['command']}`, {row['device']}, {versions}, {row['date'][:16].replace('T', ' ')} UTC"
            found.setdefault(told, []).append(target.title)
    return [f"* {told}: {'; '.join(titles)}" for told, titles in found.items()]


def bars(found: Bars, heads: tuple[str, str]) -> list[str]:
    """A plot's data as a table; a label without values is a heading."""
    names = list(dict.fromkeys(name for _, values in found for name in values))
    lines = ["| " + " | ".join([heads[0], *(f"{heads[1]}, {name}" if name else heads[1] for name in names)]) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for label, values in found:
        cells = [number(values[name]) if name in values else "" for name in names]
        lines.append("| " + " | ".join([label if values else f"**{label}**", *cells]) + " |")
    return lines


def cpu(rows: Sequence[Row]) -> list[str]:
    """Ours and llama.cpp, before and now, with the factor that must be reached."""
    lines = ["| engine | work | before, tokens/s | × llama.cpp | now, tokens/s | × llama.cpp | must | |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for engine, works in cpu_groups(rows).items():
        for place, (work, pair) in enumerate(works.items()):
            lines.append("| " + " | ".join([engine if place == 0 else "", work, *_cpu_cells(pair)]) + " |")
    return lines


def _cpu_cells(pair: Pair) -> list[str]:
    before, now = pair.before, pair.now
    must = CPU_MUST[now["phase"], now["prompt"]]
    old = ["–", ""] if before is None else [f"{before['ours']:.0f}", f"{before['ratio']:.2f}"]
    reached = "reached" if now["ratio"] >= must else "missed"
    return [*old, f"{now['ours']:.0f}", f"**{now['ratio']:.2f}**", f"{must:g}", reached]
