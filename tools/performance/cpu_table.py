"""SmolLM2 on two CPU cores beside llama.cpp: medians over the runs of a processor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks.targets import CPU_MUST
from tools.performance.provenance import provenance_line
from tools.performance.rows import Row

WORKLOADS = {
    ("decode", 16): "decode after 16 tokens",
    ("decode", 512): "decode after 512 tokens",
    ("prefill", 512): "prefill of 512 tokens",
}
OLDER_CODE = ("before ", "at ")
"""Beginnings of a row's note that say that older code was measured."""
PROCESSORS = {
    "AMD EPYC (family 26 model 2)": "Zen 5",
    "AMD EPYC (family 25 model 17)": "Zen 4",
    "Intel(R) Xeon(R) Processor (family 6 model 167)": "Intel Xeon",
}


def cpu_groups(rows: Iterable[Row]) -> dict[str, dict[tuple[str, int], list[Row]]]:
    """Rows of ``benchmarks/llamacpp_peer.py`` by engine and processor, then by work."""
    groups: dict[str, dict[tuple[str, int], list[Row]]] = {}
    for row in rows:
        work = (row.get("phase", ""), row.get("prompt", 0))
        older = str(row.get("note", "")).startswith(OLDER_CODE)
        if row.get("op") == "llamacpp_peer" and work in WORKLOADS and not older:
            groups.setdefault(engine_label(row), {}).setdefault(work, []).append(row)
    return groups


def engine_label(row: Row) -> str:
    """How a row's engine was built, on which processor, and what else ran."""
    engine = row["engine"]
    flags = [f"-q {engine['quantization']}"] if engine["quantization"] != "none" else []
    flags += ["--quantize-head"] if engine["quantize_head"] else []
    flags += [f"--dtype {engine['dtype']}"]
    processor = str(row["device"]).partition(", ")[0]
    busy = {0: "", 1: ", one other process busy"}.get(
        row["busy"], f", {row['busy']} other processes busy"
    )
    return f"`{' '.join(flags)}`, {PROCESSORS.get(processor, processor)}{busy}"


def cpu_table(rows: Sequence[Row]) -> list[str]:
    """× llama.cpp: the median of the runs' ratios, the least, and our median tokens/s (t/s)."""
    groups = cpu_groups(rows)
    heads = [f"{title}, must {CPU_MUST[work]:g} ×" for work, title in WORKLOADS.items()]
    lines = [f"| engine, processor | {' | '.join(heads)} | runs |", "|---" * 5 + "|"]
    for label, by_work in groups.items():
        cells = [_cell(by_work.get(work, ()), CPU_MUST[work]) for work in WORKLOADS]
        runs = max(len(each) for each in by_work.values())
        lines.append(f"| {' | '.join([label, *cells, str(runs)])} |")
    used = [row for by_work in groups.values() for each in by_work.values() for row in each]
    return [*lines, "", provenance_line(used)] if used else lines


def _cell(rows: Sequence[Row], must: float) -> str:
    if not rows:
        return "–"
    ratios = [float(row["ratio"]) for row in rows]
    least = "" if len(rows) == 1 else f" (least {min(ratios):.2f})"
    missed = "" if median(ratios) >= must else " missed"
    speed = median(float(row["ours"]) for row in rows)
    return f"**{median(ratios):.2f}**{least}{missed}; {speed:.0f} t/s"
