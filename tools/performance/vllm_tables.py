"""Qwen-7B's shape on one GPU beside vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.targets import TARGETS
from tools.performance.numbers import against_target, number, ratio_number
from tools.performance.provenance import provenance_line
from tools.performance.rows import OURS, Row
from tools.performance.runs import (
    H200,
    Summary,
    can_carry_a_claim,
    newest_per_card,
    on_device,
    paired_runs,
)

PEER = "vLLM"
WORKLOADS = {
    "decode-1x128": "decode, 1 × 128, ms/token",
    "decode-1x512": "decode, 1 × 512, ms/token",
    "decode-1x1024": "decode, 1 × 1,024, ms/token",
    "decode-1x4096": "decode, 1 × 4,096, ms/token",
    "decode-8x1024": "decode, 8 × 1,024, ms/step",
    "decode-64x128": "decode, 64 × 128, ms/step",
    "decode-64x1024": "decode, 64 × 1,024, ms/step",
    "first-128": "first token, 1 × 128, ms",
    "first-512": "first token, 1 × 512, ms",
    "first-1024": "first token, 1 × 1,024, ms",
    "first-4096": "first token, 1 × 4,096, ms",
    "trace-500": "trace, 500 requests in order of arrival, s",
    "trace-500-longest-first": "the same, longest answers first on both sides, s",
}
TRACE_ORDERS = {"trace-500": "arrival", "trace-500-longest-first": "longest-first"}
"""Order in which both sides are handed the trace; rows that name none compared two orders."""

UNEVEN_PEER_CARDS = ("GPU-a38417d7-eb77-5e4a-c2bf-ca576b9404e4",)
"""Cards on whose hosts the peer's first tokens were slow and uneven: those ratios favour us."""


def vllm_summaries(rows: Iterable[Row]) -> dict[str, Summary]:
    """By work, the newest run of each card; only rows that name commit and card.

    Left out: fewer layers, other weights, code that was tried and dropped, and first tokens that
    were not measured in blocks, as vLLM's references were, or whose peer was slowed by its host.
    """
    plain = [
        row
        for row in on_device(rows, H200)
        if row.get("bench") == "table"
        and row.get("part") in ("marks", "trace")
        and can_carry_a_claim(row)
        and not {"layers", "weights", "tried"} & row.keys()
    ]
    summaries = {}
    for work in WORKLOADS:
        measured = [
            row
            for row in plain
            if row["work"] == work
            and (work not in TRACE_ORDERS or row.get("order") == TRACE_ORDERS[work])
            and not (work.startswith("first-") and row["device_id"] in UNEVEN_PEER_CARDS)
        ]
        runs = newest_per_card(paired_runs(measured, OURS, PEER))
        if runs:
            summaries[work] = Summary(runs)
    return summaries


def vllm_table(rows: Sequence[Row]) -> list[str]:
    """Medians over the cards, the median of the runs' ratios, and the least favourable run."""
    summaries = vllm_summaries(rows)
    lines = [
        f"| batch × prompt | floor | must | modelmill | | {PEER} | × as fast | least | cards |",
        "|---" * 9 + "|",
    ]
    for work, summary in summaries.items():
        target = TARGETS.get(work)
        required = None if target is None else target.required
        reached = "" if required is None else _verdict(summary, required)
        cells = (
            WORKLOADS[work],
            "–" if target is None or target.floor is None else f"{target.floor:g}",
            "–" if required is None else f"{required:g}",
            f"**{against_target(summary.engine_value, required)}**",
            reached, number(summary.peer_value), f"**{ratio_number(summary.ratio)}**",
            ratio_number(summary.worst.ratio), str(len(summary.runs)),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    used = [row for summary in summaries.values() for row in summary.rows]
    return [*lines, "", provenance_line(used)] if used else lines


def _verdict(summary: Summary, required: float) -> str:
    """Whether the median reaches the target, and on how many cards it was missed all the same."""
    missed = sum(float(run.engine["value"]) > required for run in summary.runs)
    if summary.engine_value > required:
        return "missed"
    return f"✓, missed on {missed}" if missed else "✓"
