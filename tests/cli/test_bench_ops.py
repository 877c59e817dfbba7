"""``bench ops`` on a CPU, with ceilings and cases small enough for a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.eval import op_bench
from modelmill.eval.op_cases import bench_cases
from modelmill.ops import registry

Cli = Callable[..., tuple[int, Any, str]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        op_bench,
        "bench_cases",
        lambda op, device_type, dtype: [next(iter(bench_cases(op, device_type, dtype)))],
    )
    monkeypatch.setattr(op_bench, "CACHE_FLUSH_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(op_bench, "MIN_TIMING_ROUNDS", 1)
    monkeypatch.setattr("modelmill.ops.timing.BANDWIDTH_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("modelmill.ops.timing.MATMUL_SIZE", {"cpu": 32})
    # other tests may have chosen Triton's interpreter, which takes minutes to be timed
    pytest.importorskip("triton")
    monkeypatch.setattr("modelmill.ops.triton.common.device.INTERPRETED", False)


def test_every_op_with_its_ceiling(cli: Cli, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    code, report, _ = cli("bench", "ops", "--device", "cpu", "--runs", 1, "--save", rows, "--json")
    assert code == 0
    assert {each["op"] for each in report["results"]} == set(registry.op_names())
    assert report["ceilings"]["memory_gbps"] > 0
    assert report["dtype"] == "float32"
    saved = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(saved) == len(report["results"])
    assert {"command", "device", "versions", "date", "op", "variant", "bench", "spread"} <= set(
        saved[0]
    )


def test_the_table_marks_what_is_picked(cli: Cli, tmp_path: Path) -> None:
    picked = ("--op", "rms_norm", "--op", "linear", "--device", "cpu", "--dtype", "bfloat16")
    code, text, _ = cli("bench", "ops", *picked, "--runs", 1, "--plot", tmp_path / "ops.png")
    assert code == 0
    assert text.count("▸") == 3  # two ops, and the line that says what it means
    assert "bfloat16" in text
    assert (tmp_path / "ops.png").stat().st_size > 1000


def test_a_kernel_that_fails_is_exit_code_one(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**args: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(op_bench, "runnable_implementations", lambda *args: {"torch": broken})
    code, text, _ = cli("bench", "ops", "--op", "rms_norm", "--device", "cpu")
    assert code == 1
    assert "no such instruction" in text


@pytest.mark.parametrize(
    "words",
    [
        ("ops", "engine"),
        ("ops", "--op", "rms_nrom"),
        ("ops", "--variant", "abacus"),
        ("ops", "--runs", "0"),
        ("latency",),
        ("latency", "engine", "--op", "linear"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_one_line(cli: Cli, words: tuple[str, ...]) -> None:
    code, out, err = cli("bench", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
