"""What the figures of several GPUs time: first steps and the loop as the engine runs them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import tensor_parallel
from benchmarks.workloads import WARM_UP_CALLS
from modelmill.nn.synthetic_step import synthetic_step
from modelmill.ops.registry import select_backends
from modelmill.parallel.tp_group import TPGroup
from modelmill.runtime.engine_core import EngineCore
from tests.runtime import tiny
from tests.runtime.test_cuda_graphs import FakeCapturer, filling

BYTES = 140 << 30


@pytest.mark.parametrize(
    ("ranks", "batch", "tokens", "size"),
    [
        (1, 1, 1024, 1024), (2, 1, 1024, 1024), (4, 1, 512, 512), (1, 1, 500, 512),
        (4, 1, 1024, None), (1, 1, 4096, None), (1, 8, 128, None),
    ],
)  # fmt: skip
def test_a_first_step_is_a_graph_where_the_engine_has_one(
    ranks: int, batch: int, tokens: int, size: int | None
) -> None:
    config = tensor_parallel.run_config(TPGroup(size=ranks), 1)
    padded = tensor_parallel.prefill_graph_size(config, batch, tokens, BYTES)
    assert (padded and padded.tokens) == size


def test_a_padded_step_may_be_captured_and_computes_the_same() -> None:
    model = tiny.decoder()
    step = synthetic_step(model, select_backends("cpu"), (1, 16, 16), max_context=64)
    assert not step.is_graph_capturable
    before = model(step)
    assert tensor_parallel._with(step, is_padded=True).is_graph_capturable
    assert torch.equal(model(step), before)


def test_no_counted_call_of_the_loop_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "OUTPUT_TOKENS", 4)
    tape = FakeCapturer()
    loop = filling(tape)
    captured = []
    time_batch = tensor_parallel._time_batch

    def timed(core: EngineCore, batch: int, count: int) -> tuple[float, float]:
        times = time_batch(core, batch, count)
        captured.append(tape.captured)
        return times

    monkeypatch.setattr(tensor_parallel, "_time_batch", timed)
    row = tensor_parallel.time_loop(loop, 1, 30)
    assert captured == [0, *[1] * (WARM_UP_CALLS - 1 + tensor_parallel.LOOP_ROUNDS)]
    assert tape.replayed == 1 + tensor_parallel.LOOP_ROUNDS
    assert (row["batch"], row["context"], row["rounds"]) == (1, 30, tensor_parallel.LOOP_ROUNDS)
    assert row["first_token_ms"] > 0
    assert row["value"] > 0
