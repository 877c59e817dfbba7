"""The loop as a side of a comparison: with graphs of prompts and without, in turn."""

from __future__ import annotations

import pytest

from benchmarks import side
from benchmarks.loop_table import Alone, Launched
from benchmarks.works import Work, in_turn
from tests.runtime import tiny
from tests.runtime.test_prompt_graph import Tape, filling


def test_launched_leaves_the_graphs_of_prompts_aside_for_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "MOST", tiny.VOCAB - 1)
    tape = Tape()
    loop = filling(tape, enable_prefix_caching=False)
    launched = Launched(loop)
    for seed in range(4):
        launched.generate([(30, 1)], seed)
    assert (tape.recorded, tape.replayed) == (0, 0)
    found = in_turn(Work("first-30", (30,), (1,)), [Alone(loop), launched], 3)  # type: ignore[list-item]
    assert set(found) == {"modelmill", "launched"}
    assert (tape.recorded, tape.replayed) == (1, 3)
    assert loop.runner.prompts is not None
