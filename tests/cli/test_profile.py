"""``modelmill profile`` on the tiny engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelmill.eval import profile as profiling
from tests.eval.test_chrome_trace import check_trace

Cli = Callable[..., tuple[int, Any, str]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "CPU_ROUNDS", 2)
    monkeypatch.setattr("modelmill.ops.timing.BANDWIDTH_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("modelmill.ops.timing.MATMUL_SIZE", {"cpu": 32})


def test_both_phases_as_tables_with_a_trace(cli: Cli, engine: Path, tmp_path: Path) -> None:
    trace, rows = tmp_path / "t.json", tmp_path / "rows.jsonl"
    words = (
        "profile",
        engine,
        "--device",
        "cpu",
        "--batch",
        2,
        "--prompt",
        24,
        "--trace",
        trace,
        "--save",
        rows,
    )
    code, text, err = cli(*words)
    assert code == 0
    assert "prefill, 2 × 24" in text
    assert "decode, 2 × 24" in text
    assert "layers.*.attn.core" in text
    assert "of floor" in text
    assert "ui.perfetto.dev" in err
    check_trace(json.loads(trace.read_text()))
    saved = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [each["figure"] for each in saved] == ["profile.prefill_us", "profile.decode_us"]
    assert {"floor_us", "ceilings", "device", "versions", "command"} <= set(saved[0])


def test_json_and_few_lines(cli: Cli, engine: Path) -> None:
    words = ("profile", engine, "--device", "cpu", "--phase", "prefill", "--prompt", 16)
    code, output, _ = cli(*words, "--json")
    assert code == 0
    (phase,) = output["phases"]
    assert phase["step_us"]["median"] > 0
    assert all(line["floor_us"] > 0 for line in phase["lines"])
    assert "more" in cli(*words, "--lines", 2)[1]


@pytest.mark.parametrize(
    "words", [("--batch", 0), ("--prompt", 0), ("--phase", "sideways"), ("--prompt", 10**6)]
)
def test_what_makes_no_sense_is_one_line(cli: Cli, engine: Path, words: tuple[Any, ...]) -> None:
    code, out, err = cli("profile", engine, "--device", "cpu", *words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
