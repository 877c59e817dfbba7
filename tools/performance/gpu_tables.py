"""Beside the fastest peer, without a peer, and over several GPUs: tables of NVIDIA H200s."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.targets import TARGETS
from tools.performance.numbers import against_target, number, ratio_number
from tools.performance.provenance import commit_and_age, provenance_line
from tools.performance.rows import OURS, Row
from tools.performance.runs import (
    H200,
    PairedRun,
    Summary,
    can_carry_a_claim,
    on_device,
    runs_with_peers,
)

RENAMED_WORKLOADS = {"eyes": "encoder"}
"""Names of workloads in rows before 2026-11-24 → names now."""


class PeerLine(NamedTuple):
    """A work beside its peers, of which the fastest of a run is shown.

    fields: what its rows have; peers: subjects that do the same work; rate: the field of the row
    that is shown instead of ``value``.
    """

    title: str
    fields: dict[str, Any]
    subject: str
    peers: tuple[str, ...] = ()
    must: float | None = None
    rate: str | None = None


BFLOAT16, EAGER, VLLM = "bfloat16", "transformers", "vLLM"
_LANGUAGE_PEERS = (VLLM, EAGER)
_ENCODER_PEERS = (
    EAGER, "transformers-compiled", "transformers-reduce-overhead", "transformers-max-autotune",
    "segment-anything-fast", "segment-anything-fast-sdpa",
)  # fmt: skip
_GPT2 = {"bench": "table", "part": "gpt2"}
_SAM = {"bench": "sam", "work": "encoder"}
PEER_LINES = (
    PeerLine(
        "GPT-2 medium, float16, batch 1, prompt 128, ms/token",
        {**_GPT2, "work": "gpt2-1x128"}, OURS, _LANGUAGE_PEERS, 0.8,
    ),
    PeerLine("… batch 64, ms/step", {**_GPT2, "work": "gpt2-64x128"}, OURS, _LANGUAGE_PEERS),
    PeerLine(
        "Segment Anything ViT-H encoder, one picture, ms", {**_SAM, "batch": 1}, BFLOAT16,
        _ENCODER_PEERS, 12.5,
    ),
    PeerLine(
        "the same, eight pictures, ms", {**_SAM, "batch": 8}, BFLOAT16, _ENCODER_PEERS, 90.9
    ),
    PeerLine(
        "… in 8 bits, eight pictures, ms", {**_SAM, "batch": 8}, "fp8",
        ("segment-anything-fast-int8",),
    ),
    PeerLine(
        "MiniGPT-4, vision encoder, 16 pictures, ms",
        {"bench": "minigpt4", "work": "encoder", "pictures": 16}, BFLOAT16, (EAGER,),
    ),
    PeerLine(
        "… first token, ms", {"bench": "minigpt4", "work": "first", "pictures": 1}, BFLOAT16,
        _LANGUAGE_PEERS,
    ),
    PeerLine(
        "… 132 tokens in, 100 out, ms", {"bench": "minigpt4", "work": "request", "pictures": 1},
        BFLOAT16, _LANGUAGE_PEERS, 400.0,
    ),
    PeerLine(
        "… 64 such requests at once, requests/s",
        {"bench": "minigpt4", "work": "many", "pictures": 64}, BFLOAT16, _LANGUAGE_PEERS, 60.0,
        "requests_per_s",
    ),
)  # fmt: skip
ALONE_LINES = (
    PeerLine(
        "Qwen-7B, process start to first token, s",
        {"figure": "startup.total_s", "engine": "qwen7b.engine"}, OURS, must=20.0,
    ),
    PeerLine(
        "Segment Anything, a click to three masks on the host, ms",
        {"bench": "sam", "work": "click"}, BFLOAT16, must=3.0,
    ),
    PeerLine(
        "… everything: 1,024 points, 2,048 masks of random weights, ms",
        {"bench": "sam", "work": "everything", "returned": 2048}, BFLOAT16, must=500.0,
    ),
    PeerLine(
        "MiniGPT-4 in int4, 132 tokens in, 100 out, ms",
        {"bench": "minigpt4", "work": "request", "pictures": 1}, "int4", must=190.0,
    ),
)  # fmt: skip


def fastest_peer_table(rows: Sequence[Row]) -> list[str]:
    """Medians over the runs that have both sides, and the least favourable of them."""
    lines = [
        "| work | must | modelmill | | fastest peer | × as fast | least | runs |",
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
            f"{number(summary.peer_value)} {_names_of_peers(summary)}",
            f"**{ratio_number(summary.ratio)}**", ratio_number(summary.worst.ratio),
            str(len(summary.runs)),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", provenance_line(used)] if used else lines


def alone_table(rows: Sequence[Row]) -> list[str]:
    """What has no peer: the newest row of each, its date and commit beside it."""
    lines = ["| work | must | modelmill | | date | commit |", "|---" * 6 + "|"]
    for line in ALONE_LINES:
        measured = [row for row in _rows_of(rows, line) if row["subject"] == line.subject]
        row = max(measured, key=lambda row: str(row["date"]), default=None)
        if row is not None:
            value = float(row["value"])
            cells = (
                line.title, f"{line.must:g}", f"**{against_target(value, line.must)}**",
                _verdict(value, line), row["date"][:10], commit_and_age(row),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


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
    """A line's runs, each with the fastest of its peers; of several sets of peers the best one.

    Runs beside other sets compare with slower peers and are left out; so are those beside eager
    transformers alone wherever there is another set.
    """
    by_peers: dict[frozenset[str], list[PairedRun]] = {}
    for run in runs_with_peers(_rows_of(rows, line), line.subject, line.peers, line.rate is None):
        names = frozenset(candidate.peer["subject"] for candidate in run)
        fastest = min(run, key=lambda candidate: candidate.ratio)
        by_peers.setdefault(names, []).append(fastest)
    if len(by_peers) > 1:
        by_peers.pop(frozenset({EAGER}), None)
    return min(by_peers.values(), key=lambda runs: Summary(runs).ratio, default=[])


def _names_of_peers(summary: Summary) -> str:
    """Who the fastest peers of the runs were."""
    return " or ".join(dict.fromkeys(str(run.peer["subject"]) for run in summary.runs))


def _verdict(value: float, line: PeerLine) -> str:
    if line.must is None:
        return ""
    reached = value <= line.must if line.rate is None else value >= line.must
    return "✓" if reached else "missed"


_PARALLEL_FIGURES = {
    "step.decode_ms": "decode, {batch} × {context:,}",
    "loop.decode_ms": "… through the engine's loop",
    "loop.first_token_ms": "first token through the loop, 1 × {context:,}",
    "step.captured_ms": "first step, as a graph, {batch} × {tokens:,}",
    "step.prefill_ms": "first step, launched, {batch} × {tokens:,}",
    "sum.us": "all-reduce and norm, {tokens} × {width}, µs (NCCL)",
}
_FIGURES = list(_PARALLEL_FIGURES)


class ParallelWork(NamedTuple):
    """A line of the table, in the order of lines: the loop stands behind its step."""

    group: int
    batch: int
    size: int
    number: int

    @property
    def figure(self) -> str:
        """The name of its figure."""
        return _FIGURES[self.number]

    @property
    def step(self) -> ParallelWork:
        """The step of this loop."""
        return self._replace(number=self.group)

    @classmethod
    def of(cls, row: Row) -> ParallelWork:
        """A row's line."""
        number = _FIGURES.index(row["figure"])
        group = 0 if row["figure"] == "loop.decode_ms" else number
        return cls(group, row.get("batch", 1), row.get("context") or row["tokens"], number)


def parallel_table(rows: Sequence[Row]) -> list[str]:
    """Newest figures of ``benchmarks/tensor_parallel.py`` per number of GPUs.

    A ratio is over the figure of one GPU in the same run. A line whose figure on one GPU lies below
    the floor of its work is left out: it timed less than it says. So is the loop without its step.
    """
    by_work: dict[ParallelWork, dict[int, Row]] = {}
    single_gpu: dict[tuple[object, ...], Row] = {}
    for row in _parallel_rows(rows):
        work = ParallelWork.of(row)
        by_work.setdefault(work, {})[row["tp"]] = row
        if row["tp"] == 1:
            single_gpu[work, _run_of(row)] = row
    shown = [
        work
        for work, each in sorted(by_work.items(), key=operator.itemgetter(0))
        if not _below_floor(each.get(1))
        and (work.figure != "loop.decode_ms" or work.step in by_work)
    ]
    if not shown:
        return ["No row that names its commit is there yet."]
    counts = sorted({count for work in shown for count in by_work[work]})
    heads = ["1 GPU" if count == 1 else f"{count} GPUs" for count in counts]
    lines = [f"| ms | {' | '.join(heads)} |", "|---" * (len(counts) + 1) + "|"]
    used: list[Row] = []
    for work in shown:
        each = by_work[work]
        compared = {count: single_gpu.get((work, _run_of(row))) for count, row in each.items()}
        cells = [_parallel_cell(each.get(count), compared.get(count)) for count in counts]
        title = _PARALLEL_FIGURES[work.figure].format_map(next(iter(each.values())))
        lines.append(f"| {' | '.join([title, *cells])} |")
        used += [row for row in (*each.values(), *compared.values()) if row is not None]
    return [*lines, "", provenance_line(used)]


def _parallel_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that the table may show, by date.

    A row of the loop gives a first token too, if no counted call captured a graph: it has a number
    of rounds, or its run had measured the same work before. A first step whose row does not say
    that it was captured was launched.
    """
    measured: list[Row] = []
    before: set[tuple[object, ...]] = set()
    for row in on_device(rows, H200):
        if "tp" not in row or row["figure"] not in _FIGURES or not can_carry_a_claim(row):
            continue
        if row["figure"] == "step.prefill_ms" and row.get("captured"):
            measured.append({**row, "figure": "step.captured_ms"})
            continue
        measured.append(row)
        if row["figure"] == "loop.decode_ms" and row["batch"] == 1:
            work = (_run_of(row), row["tp"], row["context"])
            if "rounds" in row or work in before:
                first = {"figure": "loop.first_token_ms", "value": row["first_token_ms"]}
                measured.append({**row, **first})
            before.add(work)
    return sorted(measured, key=lambda row: str(row["date"]))


def _run_of(row: Row) -> tuple[str, ...]:
    """What the rows of one run have in common, and those of two have not."""
    return tuple(str(row.get(key)) for key in ("date", "command", "device"))


def _below_floor(row: Row | None) -> bool:
    """Whether a decode figure of one GPU is smaller than what reading its bytes takes."""
    if row is None or not str(row["figure"]).endswith("decode_ms"):
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
        else f" (**{ratio_number(single_gpu['value'] / row['value'])}** ×)"
    )
    return number(row["value"]) + ratio
