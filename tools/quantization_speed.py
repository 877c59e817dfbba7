"""Speed part of docs/quantization.md: LLaMA-7B steps on an H200 per weight format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tools.performance.rows import read_rows
from tools.performance.runs import H200, on_device

RESULTS = Path("benchmarks/results/h200.jsonl")
PLOT = Path("docs/img/quantization-speed.svg")
Row = Mapping[str, Any]


class SpeedLine(NamedTuple):
    """A line of the table.

    The options of model_step.py (shape, weights, cache dtype, batch, context or prompt tokens), and
    the target.
    """

    shape: str
    weights: str
    kv: str
    batch: int
    tokens: int
    target: float | None
    prefill: bool = False


SPEED_LINES = (
    SpeedLine("llama-7b", "dense", "auto", 1, 128, None),
    SpeedLine("llama-7b", "int8", "auto", 1, 128, 2.2),
    SpeedLine("llama-7b", "int4", "auto", 1, 128, 1.6),
    SpeedLine("llama-7b", "int4-g64", "auto", 1, 128, None),
    SpeedLine("llama-7b", "int4-g32", "auto", 1, 128, None),
    SpeedLine("llama-7b", "smoothquant", "auto", 1, 128, 2.4),
    SpeedLine("llama-7b", "fp8", "auto", 1, 128, None),
    SpeedLine("qwen-7b", "fp8", "auto", 1, 128, 2.6),
    SpeedLine("llama-7b", "rptq-w8a8", "auto", 1, 128, 2.5),
    SpeedLine("llama-7b", "rptq-w4a8", "auto", 1, 128, 1.9),
    SpeedLine("llama-7b", "dense", "auto", 64, 1024, None),
    SpeedLine("llama-7b", "smoothquant", "auto", 64, 1024, None),
    SpeedLine("llama-7b", "smoothquant", "int8", 64, 1024, None),
    SpeedLine("llama-7b", "int4", "auto", 64, 1024, None),
    SpeedLine("llama-7b", "int4", "int8", 64, 1024, 7.5),
    SpeedLine("llama-7b", "smoothquant", "auto", 1, 1024, 16.0, prefill=True),
    SpeedLine("llama-7b", "fp8", "auto", 1, 1024, 16.0, prefill=True),
)
# Weights here → builds whose perplexity stands for them in the plot, the first that was measured.
BUILDS = {
    "int8": ("-q int8",),
    "int4": ("-q int4", "-q int4 --method gptq --group-size 128"),
    "int4-g64": ("-q int4 --group-size 64", "-q int4 --method gptq --group-size 64"),
    "int4-g32": ("-q int4 --group-size 32", "-q int4 --method gptq --group-size 32"),
    "smoothquant": ("-q smoothquant",),
    "fp8": ("-q fp8",),
    "rptq-w8a8": ("-q rptq", "-q rptq --bits w8a8"),
    "rptq-w4a8": ("-q rptq --bits w4a8",),
}


def step_rows(file: Path) -> list[Row]:
    """The rows of whole steps on one H200."""
    rows = [row for row in on_device(read_rows(file), H200) if "tp" not in row]
    return [
        row for row in rows if str(row.get("figure", "")).startswith("step.") and "shape" in row
    ]


def newest(rows: Sequence[Row], line: SpeedLine) -> Row | None:
    """The newest row of a line, of kernels as they are; None where it was not measured.

    Where its commit has several rows of that day, value and floor are their medians, and the spread
    is of all.
    """
    spec = {"shape": line.shape, "weights": line.weights, "kv": line.kv, "batch": line.batch}
    spec["tokens" if line.prefill else "context"] = line.tokens
    spec["figure"] = "step.prefill_ms" if line.prefill else "step.decode_ms"
    plain = [
        row
        for row in rows
        if {"kv": "auto", **row}.items() >= spec.items()
        and "--kernel" not in row["command"]
        and "--quantize-head" not in row["command"]
        and "state" not in row
    ]
    last = max(plain, key=lambda row: row["date"], default=None)
    if last is None:
        return None
    code = (last.get("commit"), last["date"][:10])
    runs = [row for row in plain if (row.get("commit"), row["date"][:10]) == code and code[0]]
    return last if len(runs) < 2 else {**last, **_over_runs(runs)}


def _over_runs(runs: Sequence[Row]) -> dict[str, Any]:
    """Medians of value and floor, the least and the most of all readings, and how many runs."""
    fields = [key for key in ("value", "floor_ms") if all(key in row for row in runs)]
    spreads = [row["spread"] for row in runs if "spread" in row]
    spread = {
        side: pick((each[side] for each in spreads), default=0.0)
        for side, pick in (("min", min), ("max", max))
    }
    medians = {key: median(row[key] for row in runs) for key in fields}
    return {**medians, "spread": spread, "runs": [row["value"] for row in runs]}


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| step | weights | KV | floor, ms | must | measured, ms | | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in SPEED_LINES:
        row = newest(rows, line)
        if row is None:
            continue
        what = (
            f"first token, {line.batch} × {line.tokens}"
            if line.prefill
            else f"{line.batch} × {line.tokens}"
        )
        what += "" if line.shape == "llama-7b" else f", {line.shape}"
        cell = f"**{row['value']:.3g}**"
        if "spread" in row:
            cell += f" ({row['spread']['min']:.3g} … {row['spread']['max']:.3g})"
        if "runs" in row:
            cell += f", {len(row['runs'])} runs"
        cells = (
            what, f"`{line.weights}`", line.kv,
            f"{row['floor_ms']:.3g}" if "floor_ms" in row else "–",
            "–" if line.target is None else f"{line.target:g}", cell, _state(row, line.target),
            str(row.get("commit") or "none"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _state(row: Row, target: float | None) -> str:
    """Whether the target is reached, and in how many runs it was missed all the same."""
    if target is None:
        return ""
    if row["value"] > target:
        return "missed"
    missed = sum(value > target for value in row.get("runs", ()))
    return f"reached, missed in {missed}" if missed else "reached"


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows that the table shows."""
    return [row for line in SPEED_LINES if (row := newest(rows, line)) is not None]


def points(rows: Sequence[Row], accuracy: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Return (weights, ms per token, % perplexity), batch 1 after 128 tokens, where both exist."""
    plain = [
        row for row in accuracy if row.get("kv_cache_dtype", "auto") == "auto" and "excess" in row
    ]
    excess = {row["options"]: 100 * row["excess"] for row in plain}
    points = []
    for line in SPEED_LINES:
        one = (line.shape, line.batch, line.tokens, line.prefill) == ("llama-7b", 1, 128, False)
        row = newest(rows, line) if one else None
        build = next((each for each in BUILDS.get(line.weights, ()) if each in excess), None)
        if row is not None and build is not None:
            points.append((line.weights, row["value"], excess[build]))
    return points


def draw_plot(rows: Sequence[Row], accuracy: Sequence[Row], file: Path) -> None:
    """What a recipe costs in perplexity over what a token takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "modelmill"
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, ms, excess in points(rows, accuracy):
        at = (ms, max(excess, 0.01))
        axes.plot(*at, "o", color="#d62728")
        axes.annotate(name, at, xytext=(6, 3), textcoords="offset points", fontsize=8)
    dense = newest(rows, SPEED_LINES[0])
    if dense is not None:
        axes.axvline(dense["value"], color="#7f7f7f", linewidth=1)
        axes.annotate(
            "bfloat16",
            (dense["value"], 1.0),
            xytext=(-52, 3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("ms a token, LLaMA-7B's shape, one sequence, H200")
    axes.set_ylabel("perplexity over float32, % (SmolLM2-135M)")
    axes.set_title("Speed and what it costs")
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
