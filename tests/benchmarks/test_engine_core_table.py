"""The loop as a side of a comparison: with graphs of prompts and without, in turn."""

from __future__ import annotations

import pytest

from benchmarks import peer_process
from benchmarks.engine_core_table import EagerPromptSide, EngineCoreSide
from benchmarks.workloads import Workload, measure_in_turn
from tests.runtime import tiny
from tests.runtime.test_cuda_graphs import FakeCapturer, filling


def test_launched_leaves_the_graphs_of_prompts_aside_for_its_own_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_process, "MAX_TOKEN_ID", tiny.VOCAB - 1)
    tape = FakeCapturer()
    loop = filling(tape, enable_prefix_caching=False)
    launched = EagerPromptSide(loop)
    for seed in range(4):
        launched.generate([(30, 1)], seed)
    assert (tape.captured, tape.replayed) == (0, 0)
    figures = measure_in_turn(
        Workload("first-30", (30,), (1,)), [EngineCoreSide(loop), launched], 3
    )  # type: ignore[list-item]
    assert set(figures) == {"modelmill", "launched"}
    # captured, and replayed for the first time, in the second call of the warm-up
    assert (tape.captured, tape.replayed) == (1, 1 + 3)
    assert loop.model_runner.prefill_graphs is not None
