"""The benchmark of sleeping engines, with a tiny engine on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sleep_mode
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny


def tiny_core(*_: Any) -> EngineCore:
    return tiny.make_engine(enable_sleep_mode=True)


def test_every_time_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_mode, "make_core", tiny_core)
    path = tmp_path / "rows.jsonl"
    sleep_mode.main(["--device", "cpu", "--rounds", "3", "--save", str(path)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["figure"] for row in rows] == [
        "sleep.sleep_ms", "sleep.wake_ms", "sleep.first_token_ms",
    ]  # fmt: skip
    for row in rows:
        assert row["value"] > 0
        assert row["spread"]["runs"] == 3
        assert row["host_bytes"] > 0
        assert row["command"].startswith("python benchmarks/sleep_mode.py --device cpu --rounds 3")
        assert {"commit", "date", "device", "versions", "kv_bytes"} <= row.keys()
    assert str(tmp_path) not in path.read_text()


def test_a_shape_becomes_an_engine_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {**sleep_mode.SHAPES["qwen2.5-0.5b"], "num_hidden_layers": 1, "vocab_size": 512}
    monkeypatch.setitem(sleep_mode.SHAPES, "qwen2.5-0.5b", shape)
    core = sleep_mode.make_core("qwen2.5-0.5b", "int8", "cpu", 1 << 24)
    assert sleep_mode.time_round(core, 0).host_bytes > 1 << 20


def test_another_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    core = tiny_core()

    def forget(engine_core: EngineCore) -> Any:
        report = wake_up(engine_core)
        engine_core.model.get_submodule("embed").weight.zero_()  # type: ignore[operator, union-attr]
        return report

    wake_up = sleep_mode.wake_up
    monkeypatch.setattr(sleep_mode, "wake_up", forget)
    with pytest.raises(SystemExit, match="the answer after waking up is"):
        sleep_mode.time_round(core, 0)
