"""Rows of ``make bench`` as tables: medians over cards, ratios of one run, refused rows."""

from __future__ import annotations

from typing import Any

import pytest

from tools.performance import plots
from tools.performance.suite_tables import suite_lines, suite_summary, suite_table


def row(subject: str, value: float, run: str, **changed: Any) -> dict[str, Any]:
    return {
        "bench": "suite", "shape": "llama-3-8b", "work": "decode-1x128", "subject": subject,
        "value": value, "floor": 3.0, "run": run, "device": "NVIDIA H200", "commit": "abc1234",
        "device_id": f"GPU-{run[0]}", "date": f"2026-01-0{run[1]}", "versions": {},
        "command": "python benchmarks/suite.py", **changed,
    }  # fmt: skip


def test_ratios_are_of_one_run_and_values_medians_over_cards() -> None:
    rows = [
        row("modelmill", 4.0, "a1"), row("vLLM", 5.0, "a1"), row("transformers", 40.0, "a1"),
        row("modelmill", 5.0, "b1"), row("vLLM", 5.5, "b1"),
        row("modelmill", 99.0, "b0"), row("vLLM", 1.0, "b0"),
    ]  # fmt: skip
    lines = suite_table(rows)
    assert lines[0] == "**NVIDIA H200**"
    assert lines[4] == (
        "| llama-3-8b | decode-1x128 | 3.00 | **4.50** | 5.25 | 40.0 | 1.18 | 1.10 | 2 |"
    )
    assert "commit `abc1234 (age" in lines[6]


def test_runs_without_a_card_all_count_and_the_fastest_of_ours_is_compared() -> None:
    cpu = {"device": "Some CPU", "device_id": None, "host_cpu": "Some CPU"}
    rows = [
        row("modelmill int8", 2.0, "a1", **cpu), row("modelmill keep", 1.0, "a1", **cpu),
        row("llama.cpp q4_0", 1.5, "a1", **cpu), row("llama.cpp q8_0", 3.0, "a1", **cpu),
        row("modelmill int8", 2.0, "b1", **cpu), row("llama.cpp q4_0", 1.0, "b1", **cpu),
    ]  # fmt: skip
    [[line]] = suite_lines([each for each in rows if each is not None]).values()
    assert line.ratios == [1.5, 0.5]
    assert len(line.runs) == 2
    assert "| 1.00 | 0.50 | 2 |" in suite_table(rows)[4]
    newer = [row(name, 2.0, "c2", **cpu, commit="def5678") for name in ("modelmill keep", "vLLM")]
    [[line]] = suite_lines([*rows, *newer]).values()
    assert line.ratios == [1.0], "code has changed since the other runs"
    other = cpu | {"commit": "def5678", "host_simd": ["avx2", "avx512f"]}
    faster = [row("modelmill keep", 1.0, "d2", **other), row("vLLM", 3.0, "d2", **other)]
    [[line]] = suite_lines([*rows, *newer, *faster]).values()
    assert line.ratios == [3.0], "another processor of the same name"
    assert suite_table(faster)[0] == "**Some CPU** (avx2, avx512f)"


@pytest.mark.parametrize("changed", [{"commit": None}, {"commit": "a-dirty"}, {"device_id": ""}])
def test_rows_without_their_origin_are_refused(changed: dict[str, Any]) -> None:
    assert suite_lines([row("modelmill", 1.0, "a1", **changed)]) == {}
    assert suite_table([]) == []


def test_a_side_alone_has_no_ratio() -> None:
    table = suite_table([row("modelmill", 4.0, "a1")])
    assert table[2] == "| ms |  | floor | modelmill | best peer ÷ ours |"
    assert table[4] == "| llama-3-8b | decode-1x128 | 3.00 | **4.00** | – |"


def test_the_summary_has_the_means_of_medians_and_the_least_run() -> None:
    rows = []
    for work, ratios in (("decode-1x128", (1.0, 3.0)), ("decode-8x128", (8.0, 8.0))):
        for run, ratio in zip(("a1", "b1"), ratios, strict=True):
            rows += [row("modelmill", 2.0, run, work=work), row("vLLM", 2 * ratio, run, work=work)]
    assert suite_summary(rows)[2:] == [
        "| NVIDIA H200, llama-3-8b | vLLM | **4.00** | – | 1.00 (decode-1x128) | 2 + 0 | 2 |"
    ]
    assert plots.suite(rows) == [("llama-3-8b, NVIDIA H200", {"decode": pytest.approx(4.0)})]
    assert len(suite_summary([row("modelmill", 4.0, "a1")])) == 2, "no peer, no line"
    assert plots.suite([row("modelmill", 4.0, "a1")]) == []
