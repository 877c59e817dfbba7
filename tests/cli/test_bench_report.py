"""What ``bench`` prints of what it measured."""

from __future__ import annotations

from typing import Any

import pytest

from modelmill.cli.bench_report import show_bench_table
from modelmill.eval import throughput
from modelmill.eval.bench_targets import TargetRun
from modelmill.eval.datasets import BenchRequest


class Timed:
    """A subject that takes a second."""

    name, device = "modelmill", "cpu"

    def warm_up(self, largest: int) -> None: ...

    def run(self, work: list[BenchRequest], progress: Any = None) -> TargetRun:
        count = len(work)
        return TargetRun(0.5, 1.0, (0.5,) * count, (0.25,) * count, 2 * count, count, 3 * count)

    def capacity_problem(self, batch: int, length: int) -> str | None:
        return None


def test_first_tokens_of_throughput_are_the_last_runs_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = throughput.measure_throughput(
        [Timed()], [BenchRequest((1,), 3)] * 20, runs=2, warmup=0
    )
    about = {
        "what": "throughput",
        "engine": "e",
        "dtype": "float32",
        "quantization": "none",
        "device": "cpu",
    }
    show_bench_table({**about, "results": [each.to_dict() for each in results]})
    out = capsys.readouterr().out
    assert "of 2 runs" in out.replace("\n", " ")
    assert "first token: of the 20 requests of the last run" in out
