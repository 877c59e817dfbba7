"""Beside transformers, without a peer, and over several GPUs: tables of one NVIDIA H200 or more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.targets import TARGETS
from tools.performance.numbers import against_target, number
from tools.performance.provenance import provenance_line
from tools.performance.rows import OURS, Row
from tools.performance.runs import (
    H200,
    PairedRun,
    Summary,
    can_carry_a_claim,
    on_device,
    paired_runs,
)

RENAMED_WORKLOADS = {"eyes": "encoder"}
"""Names of workloads in rows before 2026-11-24 → names now."""


class PeerLine(NamedTuple):
    """A work beside transformers.

    fields: what its rows have; rate: the field of the row that is shown instead of ``value``.
    """

    title: str
    fields: dict[str, Any]
    subject: str
    peer: str
    must: float | None = None
    rate: str | None = None


BFLOAT16, TRANSFORMERS, COMPILED = "bfloat16", "transformers", "transformers-compiled"
_SAM = {"bench": "sam", "work": "encoder"}
PEER_LINES = (
    PeerLine(
        "GPT-2 medium, float16, batch 1, prompt 128, ms/token",
        {"bench": "table", "work": "gpt2-1x128"}, OURS, TRANSFORMERS, 0.8,
    ),
    PeerLine(
        "Segment Anything ViT-H encoder, one picture, ms", {**_SAM, "batch": 1}, BFLOAT16,
        TRANSFORMERS, 12.5,
    ),
    PeerLine(
        "the same, transformers compiled, ms", {**_SAM, "batch": 1}, BFLOAT16, COMPILED, 12.5
    ),
    PeerLine(
        "the same, eight pictures, ms", {**_SAM, "batch": 8}, BFLOAT16, TRANSFORMERS, 90.9
    ),
    PeerLine(
        "MiniGPT-4, vision encoder, 16 pictures, ms",
        {"bench": "minigpt4", "work": "encoder", "pictures": 16}, BFLOAT16, TRANSFORMERS,
    ),
    PeerLine(
        "… first token, ms", {"bench": "minigpt4", "work": "first", "pictures": 1}, BFLOAT16,
        TRANSFORMERS,
    ),
    PeerLine(
        "… 132 tokens in, 100 out, ms", {"bench": "minigpt4", "work": "request", "pictures": 1},
        BFLOAT16, TRANSFORMERS, 400.0,
    ),
    PeerLine(
        "… 64 such requests at once, requests/s",
        {"bench": "minigpt4", "work": "many", "pictures": 64}, BFLOAT16, TRANSFORMERS, 60.0,
        "requests_per_s",
    ),
)  # fmt: skip
ALONE_LINES = (
    PeerLine(
        "Qwen-7B, process start to first token, s",
        {"figure": "startup.total_s", "engine": "qwen7b.engine"}, OURS, "", 20.0,
    ),
    PeerLine(
        "Segment Anything, a click to three masks on the host, ms",
        {"bench": "sam", "work": "click"}, BFLOAT16, "", 3.0,
    ),
    PeerLine(
        "… everything: 1,024 points, 2,048 masks of random weights, ms",
        {"bench": "sam", "work": "everything", "returned": 2048}, BFLOAT16, "", 500.0,
    ),
    PeerLine(
        "MiniGPT-4 in int4, 132 tokens in, 100 out, ms",
        {"bench": "minigpt4", "work": "request", "pictures": 1}, "int4", "", 190.0,
    ),
)  # fmt: skip


def transformers_table(rows: Sequence[Row]) -> list[str]:
    """Medians over the runs that have both sides, and the least favourable of them."""
    lines = [
        "| work | must | modelmill | | transformers | × as fast | least | runs |",
        "|---" * 8 + "|",
    ]
    used: list[Row] = []
    for line in PEER_LINES:
        summary = Summary(_peer_runs(rows, line))
        if not summary.runs:
            continue
        used += summary.rows
        value = summary.engine_value
        cells = (
            line.title, "–" if line.must is None else f"{line.must:g}",
            f"**{against_target(value, line.must)}**", _verdict(value, line),
            number(summary.peer_value), f"**{summary.ratio:.2f}**", f"{summary.worst.ratio:.2f}",
            str(len(summary.runs)),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", provenance_line(used)] if used else lines


def alone_table(rows: Sequence[Row]) -> list[str]:
    """What has no peer: the newest row of each, its commit beside it."""
    lines = ["| work | must | modelmill | | date | commit |", "|---" * 6 + "|"]
    used: list[Row] = []
    for line in ALONE_LINES:
        measured = [row for row in _rows_of(rows, line) if row["subject"] == line.subject]
        row = max(measured, key=lambda row: str(row["date"]), default=None)
        if row is not None:
            used.append(row)
            value = float(row["value"])
            cells = (
                line.title, f"{line.must:g}", f"**{against_target(value, line.must)}**",
                _verdict(value, line), row["date"][:10], row.get("commit") or "none",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", provenance_line(used)] if used else lines


def _rows_of(rows: Iterable[Row], line: PeerLine) -> list[Row]:
    """A line's rows of whole models that carry a claim; a rate stands in the place of the value."""
    named = [
        {**row, "work": RENAMED_WORKLOADS.get(row["work"], row["work"])} if "work" in row else row
        for row in on_device(rows, H200)
        if "depth" not in row and can_carry_a_claim(row)
    ]
    matching = [row for row in named if line.fields.items() <= row.items()]
    return matching if line.rate is None else [{**row, "value": row[line.rate]} for row in matching]


def _peer_runs(rows: Iterable[Row], line: PeerLine) -> list[PairedRun]:
    return paired_runs(_rows_of(rows, line), line.subject, line.peer, line.rate is None)


def _verdict(value: float, line: PeerLine) -> str:
    if line.must is None:
        return ""
    reached = value <= line.must if line.rate is None else value >= line.must
    return "✓" if reached else "missed"


_PARALLEL_FIGURES = {
    "step.decode_ms": "decode, batch {batch}, context {context:,}, ms/step",
    "loop.decode_ms": "… through the engine's loop, ms/step",
    "step.prefill_ms": "first step, {tokens:,} tokens, ms",
    "sum.us": "all-reduce and norm, {tokens} × {width}, µs (NCCL)",
}


def parallel_table(rows: Sequence[Row]) -> list[str]:
    """Figures of ``benchmarks/tensor_parallel.py`` per number of GPUs, relative to one.

    A line whose figure on one GPU lies below the floor of its work is left out: it timed less than
    it says.
    """
    by_title: dict[str, dict[int, Row]] = {}
    measured = [row for row in on_device(rows, H200) if "tp" in row and can_carry_a_claim(row)]
    for figure, title in _PARALLEL_FIGURES.items():
        for row in (row for row in measured if row["figure"] == figure):
            by_title.setdefault(title.format_map(row), {})[row["tp"]] = row
    by_title = {title: each for title, each in by_title.items() if not _below_floor(each.get(1))}
    if not by_title:
        return ["No row that names its commit is there yet."]
    counts = sorted({count for each in by_title.values() for count in each})
    heads = ["1 GPU" if count == 1 else f"{count} GPUs" for count in counts]
    lines = [f"| work | {' | '.join(heads)} |", "|---" * (len(counts) + 1) + "|"]
    for title, each in by_title.items():
        cells = [_parallel_cell(each.get(count), each.get(1)) for count in counts]
        lines.append(f"| {' | '.join([title, *cells])} |")
    used = [row for each in by_title.values() for row in each.values()]
    return [*lines, "", provenance_line(used)] if used else lines


def _below_floor(row: Row | None) -> bool:
    """Whether a decode figure of one GPU is smaller than what reading its bytes takes."""
    if row is None or "context" not in row:
        return False
    target = TARGETS.get(f"decode-{row['batch']}x{row['context']}")
    return target is not None and target.floor is not None and row["value"] < target.floor


def _parallel_cell(row: Row | None, single_gpu: Row | None) -> str:
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
