"""How an engine core fits its model, its device and its run options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.nn.linear import Linear
from modelmill.parallel.tp_group import TPGroup
from modelmill.runtime import capacity, model_runner
from modelmill.runtime.batch import Packer
from modelmill.runtime.batch_layout import BatchLayout
from modelmill.runtime.chunked_prefill import max_mixed_tokens
from modelmill.runtime.kv_memory import weight_bytes
from modelmill.runtime.model_runner import GraphLimits
from modelmill.runtime.scheduler import SchedulerLimits
from modelmill.weights import base
from tests.runtime import tiny


def test_how_long_a_sequence_may_be() -> None:
    model = tiny.decoder(max_len=128)
    assert capacity.max_sequence_len(model, RunConfig(), None) == 128
    assert capacity.max_sequence_len(model, RunConfig(), 100) == 100
    assert capacity.max_sequence_len(model, RunConfig(max_model_len=50), 100) == 50
    with pytest.raises(UsageError, match="exceeds the engine's 100"):
        capacity.max_sequence_len(model, RunConfig(max_model_len=101), 100)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        capacity.max_sequence_len(model, RunConfig(max_model_len=0), None)


def test_what_a_step_may_hold() -> None:
    model = tiny.decoder()
    config = RunConfig(
        max_num_batched_tokens=60, max_num_seqs=5, page_size=8, enable_prefix_caching=False
    )
    assert capacity.scheduler_limits(model, config, on_gpu=False) == SchedulerLimits(
        60, 5, 8, False, None, prefill_all_first=True
    )
    assert capacity.scheduler_limits(
        model, config, on_gpu=True
    ).max_mixed_tokens == max_mixed_tokens(weight_bytes(model))
    explicit = RunConfig(max_mixed_tokens=9)
    assert [
        capacity.scheduler_limits(model, explicit, on_gpu=gpu).max_mixed_tokens
        for gpu in (False, True)
    ] == [9, 9]
    assert not capacity.scheduler_limits(model, explicit, on_gpu=True).prefill_all_first, (
        "an explicit limit is kept"
    )


@pytest.mark.parametrize(
    ("weight_format", "eight"), [("w8a8", True), ("fp8", True), ("int8", False), ("dense", False)]
)
def test_steps_are_larger_where_inputs_have_8_bits(weight_format: str, eight: bool) -> None:
    model = tiny.decoder()
    for module in model.modules():
        if isinstance(module, Linear) and module is not model.head:
            module.weight = base.pack(weight_format, torch.randn(module.shape), torch.float32)
    expected = max_mixed_tokens(weight_bytes(model), inputs_8bit=eight)
    assert capacity.scheduler_limits(model, RunConfig(), on_gpu=True).max_mixed_tokens == expected


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("enabled", "rows", "max_seqs"), [(True, 40, 40), (True, 4000, 512), (False, 40, None)]
)
def test_graphs_and_the_buffer_whose_address_they_know(
    enabled: bool, rows: int, max_seqs: int | None, ranks: int
) -> None:
    reserved: list[BatchLayout] = []
    packer = SimpleNamespace(reserve=reserved.append)
    config = RunConfig(
        cuda_graphs=enabled, max_num_seqs=rows, max_num_batched_tokens=5000, page_size=16
    )
    capacity.reserve_step_buffers(cast(Packer, packer), config, 7)
    assert reserved == [BatchLayout(5000, rows, 5000 + rows, 14)]
    limits = capacity.graph_limits(config, 7, TPGroup(size=ranks))
    if max_seqs is None:
        assert limits is None
    else:
        assert limits == GraphLimits(max_seqs, 7 * 16, 5000 if ranks == 1 else None)


@pytest.mark.parametrize("prefill_tokens", [None, 96])
def test_a_runner_has_its_graphs_from_the_start(
    monkeypatch: pytest.MonkeyPatch, prefill_tokens: int | None
) -> None:
    """What the constructors get: on a GPU they would reserve a memory pool."""
    made: dict[str, tuple[Any, ...]] = {}
    for name in ("DecodeGraphs", "PrefillGraphs"):
        monkeypatch.setattr(
            model_runner, name, lambda *args, name=name: made.update({name: args}) or name
        )
    monkeypatch.setattr(model_runner, "PrefillGraphCapturer", lambda: "capturer")
    before = tiny.make_engine().model_runner
    runner = model_runner.ModelRunner(
        before.model, before.ops, before.kv, before.packer, before.sampler, 4,
        graph_limits=GraphLimits(3, 112, prefill_tokens),
    )  # fmt: skip
    forward, select_ids = runner.forward, runner.sampler.select_ids
    decode = {"DecodeGraphs": (forward, select_ids, runner.last_ids, runner.packer, 3, 112)}
    prefill = {"PrefillGraphs": (forward, "capturer", 96, 112)}
    assert made == decode | ({} if prefill_tokens is None else prefill)
    assert runner.decode_graphs == "DecodeGraphs"
    assert runner.prefill_graphs == (None if prefill_tokens is None else "PrefillGraphs")
