"""The fused tree beside the plain one: same names, same leaves, no module that only one has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelmill.loader.model_loader import build_model
from modelmill.nn.fusion import FusedCausalLM, fuse_model
from modelmill.nn.linear import Linear
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.synthetic_step import fill_random_weights, synthetic_step
from modelmill.ops import registry
from tests.parallel.test_shard_model import GPT2, LLAMA
from tests.runtime import tiny

CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


def _model(model_type: str) -> nn.Module:
    model = build_model(model_type, CONFIGS[model_type])
    return fill_random_weights(model, {}, torch.float32, "cpu")


@pytest.mark.parametrize("model_type", CONFIGS)
def test_names_and_leaves_are_those_of_the_plain_modules(model_type: str) -> None:
    model = _model(model_type)
    fused = fuse_model(model)
    assert isinstance(fused, FusedCausalLM)
    assert {name for name, _ in fused.named_modules()} == {
        name for name, _ in model.named_modules()
    }
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
    assert linears
    assert all(fused.get_submodule(name) is linear for name, linear in linears.items())


def test_a_weight_that_is_replaced_later_is_read_by_both() -> None:
    model = _model("llama")
    fused = fuse_model(model)
    step = synthetic_step(model, registry.select_backends("cpu", {"decode": "torch"}), (1, 5, 5))
    before = fused(step)
    model.layers[0].mlp.down_proj.weight = model.layers[1].mlp.down_proj.weight  # type: ignore[union-attr, index]
    assert not torch.equal(fused(step), before)
    torch.testing.assert_close(fused(step), model(step), rtol=1e-4, atol=1e-5)


def test_a_model_without_a_decoder_stays_as_it_is() -> None:
    other = nn.Linear(2, 2)
    assert fuse_model(other) is other


def test_forward_hooks_take_the_fused_modules_out() -> None:
    runner = tiny.make_engine().model_runner
    assert isinstance(runner.model_to_run, FusedCausalLM)
    with runner.forward_hooks(after=lambda *_: None):
        assert runner.model_to_run is runner.model
        assert isinstance(runner.model_to_run.layers[0], PreNormLayer)  # type: ignore[index]
    assert isinstance(runner.model_to_run, FusedCausalLM)
