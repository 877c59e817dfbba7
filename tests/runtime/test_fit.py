"""What follows for a loop from its model, its device and what was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from modelmill.core.config import RunConfig
from modelmill.core.errors import UsageError
from modelmill.nn.linear import Linear
from modelmill.parallel.mesh import Mesh
from modelmill.runtime import fit
from modelmill.runtime.layout import Layout
from modelmill.runtime.memory import weight_bytes
from modelmill.runtime.pace import mixed_tokens
from modelmill.runtime.runner import Runner
from modelmill.runtime.scheduler import Limits
from modelmill.weights import held
from tests.runtime import tiny


def test_how_long_a_sequence_may_be() -> None:
    model = tiny.decoder(max_len=128)
    assert fit.longest(model, RunConfig(), None) == 128
    assert fit.longest(model, RunConfig(), 100) == 100
    assert fit.longest(model, RunConfig(max_model_len=50), 100) == 50
    with pytest.raises(UsageError, match="exceeds the engine's 100"):
        fit.longest(model, RunConfig(max_model_len=101), 100)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        fit.longest(model, RunConfig(max_model_len=0), None)


def test_what_a_step_may_hold() -> None:
    model = tiny.decoder()
    config = RunConfig(max_num_batched_tokens=60, max_num_seqs=5, page_size=8, enable_prefix_caching=False)
    assert fit.limits(model, config, on_gpu=False) == Limits(60, 5, 8, False, None, together=True)
    assert fit.limits(model, config, on_gpu=True).mixed == mixed_tokens(weight_bytes(model))
    asked = RunConfig(max_mixed_tokens=9)
    assert [fit.limits(model, asked, on_gpu=gpu).mixed for gpu in (False, True)] == [9, 9]
    assert not fit.limits(model, asked, on_gpu=True).together, "what was asked for is kept"


@pytest.mark.parametrize(("kind", "eight"), [("w8a8", True), ("fp8", True), ("int8", False), ("dense", False)])
def test_steps_are_larger_where_inputs_have_8_bits(kind: str, eight: bool) -> None:
    model = tiny.decoder()
    for module in model.modules():
        if isinstance(module, Linear) and module is not model.head:
            module.held = held.pack(kind, torch.randn(module.shape), torch.float32)
    expected = mixed_tokens(weight_bytes(model), eight_bits=eight)
    assert fit.limits(model, RunConfig(), on_gpu=True).mixed == expected


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("wanted", "rows", "largest"), [(True, 40, 40), (True, 4000, 512), (False, 40, None)])
def test_graphs_and_the_buffer_whose_address_they_know(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, rows: int, largest: int | None, ranks: int
) -> None:
    made: dict[str, tuple[Any, ...]] = {}
    for name in ("Graphs", "PromptGraphs"):
        monkeypatch.setattr(fit, name, lambda *given, name=name: made.update({name: given}) or name)
    monkeypatch.setattr(fit, "Recorder", lambda: "recorder")
    reserved: list[Layout] = []
    packer = SimpleNamespace(reserve=reserved.append)
    runner = SimpleNamespace(
        packer=packer, sampler=SimpleNamespace(pick="pick"), forward="forward", last="last", graphs=None, prompts=None,
        mesh=Mesh(size=ranks),
    )  # fmt: skip
    config = RunConfig(cuda_graphs=wanted, max_num_seqs=rows, max_num_batched_tokens=5000, page_size=16)
    fit.fit_on_gpu(cast(Runner, runner), config, 7)
    assert reserved == [Layout(5000, rows, 5000 + rows, 14)]
    decode = {"Graphs": ("forward", "pick", "last", packer, largest, 7 * 16)}
    prompts = {"PromptGraphs": ("forward", "recorder", 5000, 7 * 16)}
    assert made == ((decode | (prompts if ranks == 1 else {})) if wanted else {})
    assert runner.graphs == ("Graphs" if wanted else None)
    assert runner.prompts == ("PromptGraphs" if wanted and ranks == 1 else None)
