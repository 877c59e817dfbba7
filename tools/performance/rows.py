"""The measured rows, and the newest, the first and the paired ones of each figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
OURS = "modelmill"
RENAMED_OPS = {
    "rotation": "rope_cos_sin",
    "gelu_linear": "linear_gelu",
    "cluster_quant": "rptq_quant",
    "clustered_linear": "rptq_linear",
    "enlarge": "upsample_masks",
    "gated_linear": "linear_swiglu",
    "gated_int8_linear": "int8_linear_swiglu",
    "gated_int4_linear": "int4_linear_swiglu",
    "gated8_linear": "w8a8_linear_swiglu",
    "add_linear": "linear_add",
    "rope_linear": "qkv_rope_cache",
}
"""Ops under the names that rows measured before November 2026 have, and what they are called now.
"""
_LATENCIES = {
    "decode": "latency.per_token_ms",
    "gpt2": "latency.per_token_ms",
    "first": "latency.first_token_ms",
}


def read_rows(path: Path) -> list[Row]:
    """The rows of a jsonl file in order; none where there is no file.

    Raises ValueError naming a line that is none.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                raise ValueError(f"{path}, line {number} is not JSON") from None
            if row.get("op") in RENAMED_OPS:
                row["op"] = RENAMED_OPS[row["op"]]
            rows.append(row)
    return rows


@dataclass(frozen=True)
class MeasuredFigure:
    """A figure with the least and most of its runs (None where a row kept none)."""

    value: float
    min: float | None
    max: float | None
    runs: int | None
    row: Row

    @staticmethod
    def from_row(row: Row) -> MeasuredFigure:
        """The figure of a row of ``benchmarks/table.py`` or ``modelmill bench``."""
        spread = row.get("spread") or {}
        return MeasuredFigure(
            row["value"], spread.get("min"), spread.get("max"), spread.get("runs"), row
        )


@dataclass(frozen=True)
class TargetLine:
    """What is known of one line of the speed table.

    newest and first: figures by date. beside_peer, peers: the engine and others in the newest run
    that has both, measured by the same statistic.
    """

    newest: MeasuredFigure | None
    first: MeasuredFigure | None
    beside_peer: MeasuredFigure | None
    peers: Mapping[str, MeasuredFigure]


def make_target_line(workload: str, rows: Sequence[Row]) -> TargetLine:
    """The line of a work of ``benchmarks/targets.py``.

    Rows of ``table.py`` come before ``modelmill bench``.
    """
    tables = [
        row
        for row in rows
        if row.get("bench") == "table" and row["work"] == workload and _is_plain_row(row)
    ]
    our_rows = [row for row in tables if row["subject"] == OURS]
    benches = [row for row in rows if _is_bench_row(workload, row)]
    first = min([*our_rows, *benches], key=_date, default=None)
    newest = max(our_rows or benches, key=_date, default=None)
    others = {row["run"] for row in tables if not str(row["subject"]).startswith(OURS)}
    beside = max((row for row in our_rows if row["run"] in others), key=_date, default=None)
    run = None if beside is None else beside["run"]
    peers = {
        row["subject"]: MeasuredFigure.from_row(row)
        for row in tables
        if row["run"] == run and row["subject"] != OURS
    }
    return TargetLine(
        _measured_or_none(newest), _measured_or_none(first), _measured_or_none(beside), peers
    )


def _date(row: Row) -> str:
    return str(row["date"])


def _is_plain_row(row: Row) -> bool:
    """Return whether a ``table.py`` row is of the whole model, default weights and kept code.

    Rows of several GPUs have their own table (``cards_table``).
    """
    return not {"layers", "weights", "tried", "card"} & row.keys()


def _measured_or_none(row: Row | None) -> MeasuredFigure | None:
    return None if row is None else MeasuredFigure.from_row(row)


def _is_bench_row(work: str, row: Row) -> bool:
    """Return whether a ``modelmill bench`` row with plain options on one GPU measures this work."""
    if row.get("subject", OURS) != OURS or "engine" not in row:
        return False
    command, figure = str(row.get("command", "")), row.get("figure")
    if any(each in command for each in ("--tp", "--kv", "--kernel", "-q ")):
        return False
    gpt2 = str(row["engine"]).startswith("gpt2")
    phase, _, size = work.partition("-")
    if phase == "startup":
        return figure == "startup.total_s" and not gpt2
    if phase == "trace":
        return (
            figure == "throughput.seconds"
            and "--trace" in command
            and "--num-prompts" not in command
        )
    if figure != _LATENCIES.get(phase) or gpt2 != (phase == "gpt2"):
        return False
    batch, _, prompt = size.rpartition("x")
    shape = row["shape"]
    return (shape["batch"], shape["input"]) == (int(batch or 1), int(prompt))


def newest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Return the last row of each combination of keys, in the order of first appearance."""
    latest: dict[str, Row] = {}
    for row in rows:
        latest[json.dumps([row.get(key) for key in keys])] = row
    return list(latest.values())


def kernels(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each op, case, type and variant, references left out."""
    timed = [
        row for row in rows if "op" in (row.get("bench"), row.get("figure")) and "variant" in row
    ]
    ops = [row for row in timed if row["variant"] != "torch"]
    return newest(ops, "op", "dtype", "case", "variant")


def rows_by_state(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group rows that name a ``state`` of the code by (run, work), where there is a comparison."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "state" in row and "run" in row and "value" in row:
            groups.setdefault((row["run"], workload_text(row)), []).append(row)
    return {key: group for key, group in groups.items() if len(group) > 1}


def workload_text(row: Row) -> str:
    """The work of a row with a state, in words."""
    if "batch" in row and "context" in row:
        return f"decode, batch {row['batch']}, context {row['context']:,}"
    if "batch" in row and "tokens" in row:
        return f"prefill, batch {row['batch']}, {row['tokens']:,} tokens"
    if row.get("op"):
        return " ".join(str(row[key]) for key in ("op", "dtype", "case") if key in row)
    return {"trace.loop_s": "the trace, the loop alone"}.get(
        str(row.get("figure")), str(row.get("figure", "?"))
    )


def row_unit(row: Row) -> str:
    """The row's unit, or what its figure's name ends in."""
    return str(row.get("unit") or str(row.get("figure", "")).rpartition("_")[2])


@dataclass(frozen=True)
class BeforeAfter:
    """Return the newest row of a figure, and the newest whose note says it predates the changes."""

    before: Row | None
    after: Row


def cpu_groups(rows: Iterable[Row]) -> dict[str, dict[str, BeforeAfter]]:
    """Rows of ``benchmarks/llamacpp_peer.py`` by engine and work."""
    groups: dict[str, dict[str, dict[bool, Row]]] = {}
    for row in rows:
        if row.get("op") == "llamacpp_peer" and (row["phase"], row["prompt"]) in CPU_WORKLOADS:
            work = CPU_WORKLOADS[row["phase"], row["prompt"]]
            before = str(row.get("note", "")).startswith("before ")
            groups.setdefault(cpu_engine(row), {}).setdefault(work, {})[before] = row
    ordered = {
        engine: {w: works[w] for w in CPU_WORKLOADS.values() if w in works}
        for engine, works in groups.items()
    }
    return {
        engine: {
            work: BeforeAfter(each.get(True), each[False])
            for work, each in works.items()
            if False in each
        }
        for engine, works in ordered.items()
    }


CPU_WORKLOADS = {
    ("decode", 16): "decode after 16 tokens",
    ("decode", 512): "decode after 512 tokens",
    ("prefill", 512): "prefill of 512 tokens",
}


DEFAULT_CPU = "AMD EPYC (family 26 model 2)"


def cpu_engine(row: Row) -> str:
    """Describe how a row's engine was built, on which other machine, and what else ran."""
    engine = row["engine"]
    flags = [f"-q {engine['quantization']}"] if engine["quantization"] != "none" else []
    flags += ["--quantize-head"] if engine["quantize_head"] else []
    flags += [f"--dtype {engine['dtype']}"]
    processor = row["device"].replace("(R)", "").partition(", ")[0]
    maker = processor.partition(" (")[0]
    machine = (
        ""
        if processor == DEFAULT_CPU
        else f", {processor if DEFAULT_CPU.startswith(maker) else maker}"
    )
    busy = {0: "", 1: ", one other process busy"}.get(
        row["busy"], f", {row['busy']} other processes busy"
    )
    return f"`{' '.join(flags)}`{machine}{busy}"
