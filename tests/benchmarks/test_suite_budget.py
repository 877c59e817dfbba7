"""``make bench`` within its minutes: which rounds fit, and what an interrupted run leaves."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import suite
from benchmarks.peer_process import Lengths
from benchmarks.suite_budget import TimeBudget, rounds_that_fit, slow_peers
from benchmarks.suite_resume import DATE_FORMAT, find_unfinished_run
from tests.benchmarks.test_suite import FakeSide, options_for, run_cpu_with

NOW = datetime(2026, 1, 1, tzinfo=UTC)
IDENTITY = {"command": "python benchmarks/suite.py", "commit": "abc", "device": "CPU"}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.integers(1, 15), st.floats(0, 2000)
)
def test_rounds_fit_or_are_one(numbers: list[float], rounds: int, seconds: float) -> None:
    costs = {f"side {number}": cost for number, cost in enumerate(numbers)}
    slow = slow_peers(costs, ["side 0"])
    chosen = rounds_that_fit(costs, rounds, seconds, slow)
    assert chosen.keys() == costs.keys()
    assert all(1 <= count <= rounds for count in chosen.values())
    compared = {chosen[side] for side in costs if side not in slow}
    assert len(compared) == 1, "what is compared has the same rounds"
    assert all(chosen[side] <= max(compared) for side in slow)
    assert compared == {rounds} or {chosen[side] for side in slow} <= {1}
    total = sum(chosen[side] * costs[side] for side in costs)
    assert total <= seconds or set(chosen.values()) == {1}
    assert rounds_that_fit(costs, rounds, None) == dict.fromkeys(costs, rounds)


def test_peers_without_a_ratio_pay_first() -> None:
    costs = {"modelmill": 3.0, "llama.cpp q8_0": 3.5, "transformers": 22.0}
    slow = slow_peers(costs, ["modelmill"])
    assert slow == {"transformers"}
    assert rounds_that_fit(costs, 5, 80, slow) == dict(zip(costs, (5, 5, 2), strict=True))
    assert rounds_that_fit(costs, 5, 40, slow) == dict(zip(costs, (2, 2, 1), strict=True))


def test_both_sides_of_a_ratio_lose_as_many_rounds() -> None:
    costs = {"modelmill": 3.0, "transformers": 22.0}
    slow = slow_peers(costs, ["modelmill"])
    assert not slow, "the only peer is the fastest one"
    assert rounds_that_fit(costs, 5, 80, slow) == {"modelmill": 3, "transformers": 3}


def test_a_budget_is_shared_by_what_is_left() -> None:
    now = [0.0]
    budget = TimeBudget(2, lambda: now[0])
    now[0] = -500
    assert budget.left() == 120, "engines are being built"
    now[0] = 0.0
    budget.begin()
    assert budget.share(3) == 40
    budget.begin()
    now[0] = 90
    assert budget.share(1) == 30
    assert not budget.is_over()
    now[0] = 130
    assert budget.is_over()
    assert budget.left() == 0
    assert TimeBudget(None).share(3) is None


def write_run(out: Path, **changes: Any) -> None:
    row = {
        **IDENTITY, "bench": "suite", "shape": "s", "work": "first-512", "subject": "modelmill",
        "floor": 1.0, "spread": {"value": 2.0, "min": 1.0, "max": 3.0, "runs": 4},
        "calls_s": {"all": [0.002]}, "run": "suite-1", "date": NOW.strftime(DATE_FORMAT),
    }  # fmt: skip
    out.write_text(json.dumps(row | changes) + "\n", encoding="utf-8")


PLANNED = [("s", "first-512"), ("s", "decode-1x16")]


def test_an_interrupted_run_is_taken_up(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert find_unfinished_run(out, IDENTITY, PLANNED, NOW) is None
    write_run(out)
    unfinished = find_unfinished_run(out, IDENTITY, PLANNED, NOW + timedelta(hours=1))
    assert unfinished is not None
    assert unfinished.run == "suite-1"
    assert [(line.shape, line.work, line.floor) for line in unfinished.lines] == [
        ("s", "first-512", 1)
    ]
    assert unfinished.lines[0].figures["modelmill"].value == 2
    more = IDENTITY | {"command": "python benchmarks/suite.py --minutes 9"}
    assert find_unfinished_run(out, more, PLANNED, NOW) is not None
    assert find_unfinished_run(out, IDENTITY, PLANNED[:1], NOW) is None  # it is complete
    assert find_unfinished_run(out, IDENTITY, PLANNED, NOW + timedelta(days=1)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "other"}, {"commit": "abc-dirty"}, {"device": "GPU"},
        {"command": "… --rounds 2"}, {"host_simd": ["avx512f"]},
    ],
)  # fmt: skip
def test_other_code_machines_and_commands_are_not(changes: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    write_run(out, **changes)
    assert find_unfinished_run(out, IDENTITY, PLANNED, NOW) is None
    identity = IDENTITY | {"commit": changes.get("commit", "abc")}
    if identity["commit"].endswith("-dirty"):
        assert find_unfinished_run(out, identity, PLANNED, NOW) is None


class Interrupted(FakeSide):
    """Ctrl-C in the first call of a prompt of 512 tokens."""

    def generate(self, lengths: Any, seed: int) -> float:
        if lengths[0] == (512, 16):
            raise KeyboardInterrupt
        return super().generate(lengths, seed)


def test_an_interrupted_run_prints_its_table_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "host_and_gpu_info", lambda: {"host_cpu": "x", "host_cores": 99})
    with pytest.raises(SystemExit, match="the same command"):
        run_cpu_with([Interrupted("modelmill int8", 0.01)], tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("decode-1x16") == 2  # as it came, and in the table
    assert "decode-1x512" not in printed
    (tmp_path / "model.int8.engine" / "weights.safetensors").unlink()
    (tmp_path / "model.int8.engine").rmdir()
    rows = run_cpu_with([FakeSide("modelmill int8", 0.02)], tmp_path, monkeypatch)
    assert [(row["work"], round(row["value"])) for row in rows] == [
        ("decode-1x16", 10), ("decode-1x512", 20), ("first-512", 20)
    ]  # fmt: skip
    assert len({row["run"] for row in rows}) == 1
    assert "decode-1x16" in capsys.readouterr().out


def test_half_a_row_is_left_out_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    write_run(out)
    with out.open("a") as sink:
        sink.write('{"bench": "suite", "sha')
    unfinished = find_unfinished_run(out, IDENTITY, PLANNED, NOW)
    assert unfinished is not None
    assert unfinished.run == "suite-1"
    out.write_text('{"bench": "suite", "sha')
    monkeypatch.setattr(suite, "host_and_gpu_info", lambda: {"host_cpu": "x", "host_cores": 99})
    with pytest.raises(json.JSONDecodeError):  # of the first line alone
        run_cpu_with([FakeSide("modelmill int8", 0.01)], tmp_path, monkeypatch)
    lines = out.read_text().splitlines()
    assert [json.loads(line)["subject"] for line in lines[1:]] == ["modelmill int8"] * 3


def test_an_interrupted_run_of_changed_code_says_that_it_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "host_and_gpu_info", lambda: {"host_cpu": "x", "host_cores": 99})
    side = [Interrupted("modelmill int8", 0.01)]
    with pytest.raises(SystemExit, match="code with local changes is not taken up"):
        run_cpu_with(side, tmp_path, monkeypatch, "--commit", "abc-dirty")


def test_a_peer_that_takes_all_the_time_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_for(tmp_path)
    options.budget = TimeBudget(1, lambda: 0.0)
    options.gguf = tmp_path / "model.gguf"
    monkeypatch.setattr("tests.benchmarks.test_suite.options_for", lambda *_: options)
    sides = [FakeSide("modelmill int8", 0.01), FakeSide("transformers", 1.0)]
    rows = run_cpu_with(sides, tmp_path, monkeypatch)
    assert {(row["work"], row["subject"]) for row in rows} == {
        ("decode-1x16", "modelmill int8"), ("decode-1x512", "modelmill int8"),
        ("first-512", "modelmill int8"), ("first-512", "transformers"),
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert (
        "not measured: transformers smollm2-135m decode-1x16: a round takes about 320 s" in printed
    )
    assert "not measured: transformers smollm2-135m decode-1x512: too slow" in printed


@pytest.mark.parametrize(("seconds_per_call", "num_works"), [(0.5, 3), (60.0, 1)])
def test_the_minutes_run_while_it_measures_not_before(
    seconds_per_call: float, num_works: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Clocked(FakeSide):
        def ready(self) -> dict[str, Any]:
            now[0] += 1000
            return super().ready()

        def generate(self, lengths: Lengths, seed: int) -> float:
            now[0] += seconds_per_call
            return super().generate(lengths, seed)

    options = options_for(tmp_path)
    options.budget = TimeBudget(1, lambda: now[0])
    options.gguf = tmp_path / "model.gguf"
    monkeypatch.setattr("tests.benchmarks.test_suite.options_for", lambda *_: options)
    rows = run_cpu_with([Clocked("modelmill int8", 0.01)], tmp_path, monkeypatch)
    assert len({row["work"] for row in rows}) == num_works


def test_what_the_minutes_leave_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    side = FakeSide("modelmill int8", 0.01)
    options = options_for(tmp_path)
    assert options.budget.minutes is None
    options.budget = TimeBudget(0.0)
    monkeypatch.setattr(suite, "parse_args", lambda *_: options)
    monkeypatch.setattr("tests.benchmarks.test_suite.options_for", lambda *_: options)
    options.gguf = tmp_path / "model.gguf"
    rows = run_cpu_with([side], tmp_path, monkeypatch)
    assert [row["work"] for row in rows] == ["decode-1x16"]
    assert rows[0]["spread"]["runs"] == 2  # one round
    printed = capsys.readouterr().out
    assert "not measured: smollm2-135m first-512: the 0 minutes are over; the same" in printed
