"""The page's tables, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.targets import CPU_MUST, TARGETS, SpeedTarget
from tools.performance.numbers import number
from tools.performance.plots import Bars
from tools.performance.rows import (
    BeforeAfter,
    MeasuredFigure,
    Row,
    TargetLine,
    cpu_groups,
    make_target_line,
)


def speed_table(rows: Sequence[Row]) -> list[str]:
    """Return every measured line of the speed targets.

    Columns: floor, must, first, now, a run beside a peer, the required share of the peer's time,
    and our share in that run.
    """
    heads = [
        "work",
        "unit",
        "floor",
        "must",
        "first measured",
        "ours now",
        "",
        "in one run with a peer",
        "× ours",
    ]
    heads += ["required share of the peer's time", "our share"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for work, target in TARGETS.items():
        line = make_target_line(work, rows)
        if line.newest is not None:
            lines.append("| " + " | ".join(_speed_cells(target, line.newest, line)) + " |")
    return lines


def _speed_cells(target: SpeedTarget, newest: MeasuredFigure, line: TargetLine) -> list[str]:
    floor = "–" if target.floor is None else f"{target.floor:g}"
    first = (
        "–"
        if line.first is None or line.first.row["date"] == newest.row["date"]
        else number(line.first.value)
    )
    reached = (
        "dream"
        if newest.value <= target.stretch_goal
        else "reached"
        if newest.value <= target.required
        else "missed"
    )
    cells = [
        target.title,
        target.unit,
        floor,
        f"{target.required:g}",
        first,
        f"**{format_against_target(newest.value, target.required)}**{_range(newest)}",
        reached,
    ]
    if line.beside_peer is None:
        return [*cells, "–", "", "", ""]
    peers = [f"{_named(name, each)} {format_spread(each)}" for name, each in line.peers.items()]
    ratios = [f"**{each.value / line.beside_peer.value:.2f}**" for each in line.peers.values()]
    beside = [f"ours {number(line.beside_peer.value)}, {', '.join(peers)}", ", ".join(ratios)]
    return [*cells, *beside, *_shares(target, line.beside_peer, line.peers.get("vLLM"))]


def _shares(target: SpeedTarget, newest: MeasuredFigure, peer: MeasuredFigure | None) -> list[str]:
    """Return ``must`` over vLLM's reference time, and our time over vLLM's in one run."""
    if target.reference_mark is None or peer is None:
        return ["", ""]
    required, actual = target.required / target.reference_mark, newest.value / peer.value
    return [f"{required:.3f}", f"**{actual:.3f}**{'' if actual <= required else ' missed'}"]


def _named(name: str, measured: MeasuredFigure) -> str:
    version = measured.row.get("versions", {}).get(name.lower())
    return f"{name} {version}" if version else name


def format_spread(measured: MeasuredFigure) -> str:
    """4.21 (4.20 … 4.23)."""
    return number(measured.value) + _range(measured)


def _range(measured: MeasuredFigure) -> str:
    least, most = measured.min, measured.max
    if least is None or most is None or (measured.runs or 1) < 2 or number(least) == number(most):
        return ""
    return f" ({number(least)} … {number(most)})"


def format_against_target(value: float, target: float) -> str:
    """The number, with a digit more where it would look like what must be reached and is not."""
    text = number(value)
    return f"{value:.4g}" if value != target and float(text.replace(",", "")) == target else text


def conditions_table(rows: Sequence[Row]) -> list[str]:
    """The runs that the speed table's newest figures come from: command, device, versions, date."""
    titles_by_condition: dict[str, list[str]] = {}
    for work, target in TARGETS.items():
        newest = make_target_line(work, rows).newest
        if newest is not None:
            row = newest.row
            note = f" ({row['note']})" if "note" in row else ""
            versions = ", ".join(
                f"{name} {version}" for name, version in row["versions"].items() if name != "numpy"
            )
            condition = f"`{row['command']}`, {row['device']}, {versions}, {row['date'][:10]}"
            titles_by_condition.setdefault(condition, []).append(target.title + note)
    return [
        f"* {condition}: {'; '.join(titles)}" for condition, titles in titles_by_condition.items()
    ]


def bars_table(bars_data: Bars, heads: tuple[str, str]) -> list[str]:
    """A plot's data as a table; a label without values is a heading."""
    names = list(dict.fromkeys(name for _, values in bars_data for name in values))
    lines = [
        "| "
        + " | ".join([heads[0], *(f"{heads[1]}, {name}" if name else heads[1] for name in names)])
        + " |"
    ]
    lines.append("|---" * (len(names) + 1) + "|")
    for label, values in bars_data:
        cells = [number(values[name]) if name in values else "" for name in names]
        lines.append("| " + " | ".join([label if values else f"**{label}**", *cells]) + " |")
    return lines


def cpu_table(rows: Sequence[Row]) -> list[str]:
    """Ours and llama.cpp, before and now, with the factor that must be reached."""
    lines = [
        "| engine | work | before, tokens/s | × llama.cpp | now, tokens/s | × llama.cpp | must | |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for engine, works in cpu_groups(rows).items():
        for place, (work, pair) in enumerate(works.items()):
            lines.append(
                "| " + " | ".join([engine if place == 0 else "", work, *_cpu_cells(pair)]) + " |"
            )
    return lines


def _cpu_cells(pair: BeforeAfter) -> list[str]:
    before, now = pair.before, pair.after
    must = CPU_MUST[now["phase"], now["prompt"]]
    old = ["–", ""] if before is None else [f"{before['ours']:.0f}", f"{before['ratio']:.2f}"]
    reached = "reached" if now["ratio"] >= must else "missed"
    return [*old, f"{now['ours']:.0f}", f"**{now['ratio']:.2f}**", f"{must:g}", reached]


_GPU_FIGURES = {
    "step.decode_ms": "one step, a graph, batch {batch}, {context} tokens held, ms",
    "loop.decode_ms": "through the loop, batch {batch}, prompt {context}, ms/step",
    "step.prefill_ms": "first step, batch {batch}, {tokens} tokens, ms",
    "sum.us": "a sum over the ranks with residual and norm, {tokens} × {width} bfloat16, µs (NCCL "
    "and a norm)",
    "gather.us": "{tokens} × {width} logits in bfloat16 on every rank, µs (NCCL)",
}


def gpus_table(rows: Sequence[Row]) -> list[str]:
    """Return ``benchmarks/tensor_parallel.py`` figures per number of GPUs, relative to one GPU."""
    rows_by_title: dict[str, dict[int, Row]] = {}
    measured = [row for row in rows if "tp" in row]
    for figure, title in _GPU_FIGURES.items():
        for row in (row for row in measured if row["figure"] == figure):
            rows_by_title.setdefault(title.format_map(row), {})[row["tp"]] = row
    counts = sorted({count for each in rows_by_title.values() for count in each})
    names = ["1 GPU" if count == 1 else f"{count} GPUs" for count in counts]
    lines = ["| work | " + " | ".join(names) + " |", "|---" * (len(counts) + 1) + "|"]
    for title, each in rows_by_title.items():
        cells = [_gpu_cell(each.get(count), each.get(1)) for count in counts]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return lines


def _gpu_cell(row: Row | None, single_gpu: Row | None) -> str:
    if row is None:
        return ""
    if "nccl_us" in row:
        return f"**{number(row['value'])}** ({number(row['nccl_us'])})"
    ratio = (
        ""
        if single_gpu is None or single_gpu is row
        else f" (**{single_gpu['value'] / row['value']:.2f}** ×)"
    )
    return number(row["value"]) + ratio
