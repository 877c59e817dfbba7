"""``make bench``: its plan, its rows and its table, with sides that are no processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.figure_statistics import MeasuredFigure
from benchmarks.model_shapes import SHAPES, shape_cost
from benchmarks.peer_process import Lengths, PeerError
from benchmarks.suite_plan import works_for_cpu
from benchmarks.workloads import Workload

LIMITS = suite.DeviceLimits("Some CPU, 2 threads", 1e9, 1e12)


class FakeSide:
    """A side that needs ``per_token`` seconds for each token, and may not be installed."""

    def __init__(self, name: str, per_token: float, error: str = "") -> None:
        self.name, self.per_token, self.error = name, per_token, error
        self.facts: dict[str, Any] = {"device": "?", "versions": {name: "1"}}
        self.closed = False

    def ready(self) -> dict[str, Any]:
        if self.error:
            raise PeerError(self.error)
        return self.facts

    def generate(self, lengths: Lengths, seed: int) -> float:
        return sum(output for _, output in lengths) * self.per_token

    def close(self) -> None:
        self.closed = True


def options_for(tmp_path: Path, *more: str) -> Any:
    return suite.parse_args([
        "--work", str(tmp_path), "--out", str(tmp_path / "rows.jsonl"), "--rounds", "2",
        "--commit", "abc", "--threads", "2", *more,
    ])  # fmt: skip


def run_cpu_with(
    sides: list[FakeSide], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str
) -> list[dict[str, Any]]:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    engine = tmp_path / "model.int8.engine"
    engine.mkdir()
    (engine / "weights.safetensors").write_bytes(bytes(1_000_000))
    monkeypatch.setattr(suite, "measure_limits", lambda _: LIMITS)
    monkeypatch.setattr(suite, "cpu_sides", lambda *_: iter(sides))
    assert suite.run_cpu(options_for(tmp_path, "--gguf", str(gguf), *more)) == 0
    file = tmp_path / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_rows_of_a_cpu_carry_what_a_claim_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [
        FakeSide("modelmill int8", 0.01),
        FakeSide("llama.cpp q8_0", 0.02),
        FakeSide("transformers", 0.05, error="no such module"),
    ]
    rows = run_cpu_with(sides, tmp_path, monkeypatch)
    assert [(row["work"], row["subject"]) for row in rows] == [
        (work.name, side.name) for work in works_for_cpu() for side in sides[:2]
    ]
    row = rows[0]
    assert row["value"] == pytest.approx(10.0)
    assert row["commit"] == "abc"
    assert row["device"] == LIMITS.name
    assert {"host_cpu", "load_1m", "versions", "date", "run", "command", "threads"} <= row.keys()
    assert len(row["calls_s"]["16"]) == len(row["calls_s"]["144"]) == 4  # two in each round
    assert str(tmp_path) not in json.dumps(row)
    assert all(side.closed for side in sides)
    printed = capsys.readouterr().out
    assert "not measured: transformers: no such module" in printed
    assert "2.00" in printed  # llama.cpp takes twice as long


def test_ours_must_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="broken engine"):
        run_cpu_with([FakeSide("modelmill int8", 1, "broken engine")], tmp_path, monkeypatch)


def test_one_work_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [FakeSide("modelmill int8", 0.01)]
    rows = run_cpu_with(sides, tmp_path, monkeypatch, "--only", "first-512")
    assert [row["work"] for row in rows] == ["first-512"]


@pytest.mark.parametrize(("load", "is_busy"), [(1.5, False), (1.6, True)])
def test_a_busy_machine_is_said(
    load: float, is_busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(suite.os, "getloadavg", lambda: (2 * load, 0.0, 0.0))
    monkeypatch.setattr(suite, "host_and_gpu_info", lambda: {"host_cores": 2})
    sides = [FakeSide("modelmill int8", 0.01)]
    rows = run_cpu_with(sides, tmp_path, monkeypatch, "--only", "first-512")
    assert rows[0]["load_1m"] == 2 * load
    line = "this machine was busy: load 3.2 on 2 cores"
    assert (line in capsys.readouterr().out) == is_busy


def test_a_plan_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda _: None)
    assert suite.run_cpu(options_for(tmp_path, "--plan")) == 0
    printed = capsys.readouterr().out
    assert "decode-1x16" in printed
    assert "not measured: llama.cpp: llama-cpp-python is not installed" in printed
    assert "not measured: transformers: not installed" in printed
    assert not (tmp_path / "rows.jsonl").exists()


def test_the_floor_is_bytes_for_decode_and_products_for_long_prompts() -> None:
    cost = shape_cost(SHAPES["llama-7b"])
    decode = Workload("decode-2x100", (100, 100))
    read = 5e9 + 2 * (100 + 80) * cost.kv_bytes
    assert LIMITS.floor_ms(decode, 5e9, cost) == pytest.approx(1e3 * read / 1e9)
    short, long = (Workload(f"first-{n}", (n,), (1,)) for n in (1, 4096))
    assert LIMITS.floor_ms(short, 5e9, cost) == pytest.approx(5e3)
    expected = 1e3 * cost.prefill_operations(4096) / 1e12
    assert LIMITS.floor_ms(long, 5e9, cost) == pytest.approx(expected)
    no_products = suite.DeviceLimits("x", 1e9, None)
    assert no_products.floor_ms(long, 5e9, cost) == pytest.approx(5e3)


def test_the_ratio_compares_the_fastest_of_both() -> None:
    def figure(value: float) -> MeasuredFigure:
        return MeasuredFigure(value, value, value, 1)

    figures = {
        "modelmill int8": figure(2.0),
        "modelmill keep": figure(1.0),
        "llama.cpp q4_0": figure(1.5),
        "llama.cpp bf16": figure(9.0),
    }
    cells = suite.table_cells("decode-1x16", 0.5, figures, [*figures, "absent"])
    assert cells[0] == "decode-1x16"
    assert cells[1] == "0.50"
    assert cells[-2:] == ["–", "1.50"]
    assert suite.table_cells("w", 1, {"llama.cpp": figure(1)}, ["llama.cpp"])[-1] == "–"
    # what a side undercuts by more than rounding is no floor
    assert suite.table_cells("w", 1.01, {"modelmill": figure(1)}, [])[1] == "1.01"
    assert suite.table_cells("w", 1.1, {"modelmill": figure(1)}, [])[1] == "–"


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H200", "nvidia-h200"), ("AMD EPYC, 2 threads", "amd-epyc-2-threads")],
)
def test_the_file_is_named_after_the_device(device: str, name: str) -> None:
    assert suite.slug(device) == name


@pytest.mark.parametrize(
    "more", [("--peer", "transformers"), ("--peer", "vllm", "--peer", "transformers"),
             ("--device", "cpu")],
)  # fmt: skip
def test_who_does_not_hold_a_weight_format_is_refused(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row would say int4 of matrices in bfloat16."""
    with pytest.raises(SystemExit):
        options_for(tmp_path, "--weight-format", "int4", *more)
    assert f"leave out {' '.join(more[-2:])}" in capsys.readouterr().err
    assert options_for(tmp_path, "--weight-format", "int4", "--peer", "vllm").peer == ["vllm"]
