"""Rows of two servers under one load as a table: the newest run, refused rows."""

from __future__ import annotations

from typing import Any

import pytest

from tools.performance.serving_tables import serving_table


def row(subject: str, tokens: float, date: str = "2026-01-01", **changed: Any) -> dict[str, Any]:
    return {
        "bench": "serving_peers", "shape": "qwen2.5-7b", "work": "rate-4", "subject": subject,
        "first_token_ms": {"median": 20.0, "p99": 80.0},
        "between_pieces_ms": {"median": 4.0, "p99": 9.0}, "output_tokens_per_s": tokens,
        "requests": 40, "device": "NVIDIA H200", "commit": "abc1234", "device_id": "GPU-a",
        "date": date, "versions": {}, "command": "python benchmarks/serving_peers.py", **changed,
    }  # fmt: skip


def test_a_line_for_each_server_and_the_ratio_of_output_tokens() -> None:
    lines = serving_table([row("vLLM", 500.0), row("modelmill", 400.0)])
    assert lines[2:4] == [
        "| qwen2.5-7b, rate-4 | 40 | vLLM | 20.0 | 80.0 | 4.00 | 9.00 | 500 |  |",
        "|  |  | modelmill | 20.0 | 80.0 | 4.00 | 9.00 | 400 | **0.80** |",
    ]
    assert "commit `abc1234 (age" in lines[-1]


def test_the_newest_run_counts() -> None:
    rows = [row("vLLM", 500.0), row("modelmill", 600.0, "2026-01-02"), row("modelmill", 400.0)]
    assert "**1.20**" in "".join(serving_table(rows))


@pytest.mark.parametrize("changed", [{"commit": None}, {"commit": "a-dirty"}])
def test_rows_without_their_origin_are_refused(changed: dict[str, Any]) -> None:
    assert serving_table([row("modelmill", 1.0, **changed)]) == ["No row yet."]
