"""Experts of any layer, fused: the plain layers' results, by the chosen experts alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.loader.model_loader import build_model
from modelmill.nn import fused_moe
from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.fused_moe_lm import FusedMoELM
from modelmill.nn.fusion import fuse_model
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import MoE, RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.synthetic_step import fill_random_weights
from modelmill.ops import registry
from modelmill.parallel.tp_group import SINGLE_RANK
from tests.models.all_families import CASES
from tests.nn.test_moe import EXPERTS, HIDDEN, INNER, STEP, filled
from tests.parallel import test_shard_model


def gemma4_model(**changes: Any) -> torch.nn.Module:
    """A seeded Gemma 4."""
    config = CASES["gemma4_text"].raw(**changes)
    return test_shard_model.make_shard("gemma4_text", "dense", SINGLE_RANK, config=config)


def test_fused_layers_compute_what_plain_ones_do() -> None:
    model = gemma4_model()
    assert isinstance(fuse_model(model), FusedMoELM)
    fused = test_shard_model.logits(model, SINGLE_RANK)
    with mock.patch.object(test_shard_model, "fuse_model", lambda model: model):
        plain = test_shard_model.logits(model, SINGLE_RANK)
    # scores are not scaled: a sharp softmax multiplies a rounding
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-3)


def test_only_chosen_experts_are_computed() -> None:
    model = gemma4_model(top_k_experts=1)
    calls = []
    real = fused_moe.tokens_by_expert

    def counted(*args: Any) -> Any:
        chosen = real(*args)
        calls.append(len(chosen))
        return chosen

    with mock.patch.object(fused_moe, "tokens_by_expert", counted):
        test_shard_model.logits(model, SINGLE_RANK)
    layers = CASES["gemma4_text"].base["num_hidden_layers"]
    assert len(calls) == 2 * layers, "two steps"
    assert max(calls[layers:]) <= 4, "four tokens choose one expert each"


def test_a_model_without_experts_stays_plain() -> None:
    model = gemma4_model(enable_moe_block=False)
    assert fuse_model(model) is model


def test_every_mixture_of_every_family_is_fused() -> None:
    """A plain one waits for the host before each expert: it cannot stand in a CUDA graph."""
    with_experts = []
    for name, case in CASES.items():
        model = build_model(name, case.raw())
        plain = dict(model.named_modules())
        mixtures = [path for path, module in plain.items() if isinstance(module, MoE)]
        if not mixtures:
            continue
        with_experts.append(name)
        fill_random_weights(model, {}, torch.float32, "cpu")
        fused = dict(fuse_model(model).named_modules())
        for path in mixtures:
            assert isinstance(fused[path], FusedMoE), (name, path)
            assert fused[path].plain is plain[path], (name, path)
            assert fused[f"{path}.router"] is plain[f"{path}.router"], (name, path)
            assert isinstance(model.get_submodule(path), MoE), "the plain tree stays"
    assert len(with_experts) > 15


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_experts_are_scaled(bias: bool) -> None:
    """The router's factor and the experts' own, negative ones too, before the fused MoE op."""
    router = RouterConfig(EXPERTS, 2, bias=bias, logit_scale=0.1, expert_scale=True)
    moe = filled(MoESpec(router, MLPSpec(HIDDEN, INNER)), "dense")
    if moe.router.bias is not None:
        moe.router.bias *= 5.0
    moe.routing.expert_scale = torch.linspace(-1.0, 2.0, EXPERTS)
    ops = STEP.ops.replace(
        {"fused_moe": registry.reference("fused_moe")}, {**STEP.ops.backends, "fused_moe": "triton"}
    )
    step: Any = SimpleNamespace(ops=ops)
    x, router_input = torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    expected = moe(x, STEP, router_input)
    assert not torch.allclose(expected, moe(x, STEP)), "the router reads another value"
    for stacks in (False, True):
        fused = FusedMoE(moe, stacks=stacks)
        torch.testing.assert_close(fused(x, step, router_input), expected, rtol=1e-4, atol=1e-5)
