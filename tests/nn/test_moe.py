"""Mixtures of experts: the router against its definition, grouped tokens against one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weight_formats import mxfp4_weight
from modelmill.nn.fused_moe import FusedMoE, tokens_by_expert
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import SIGMOID, SOFTMAX, MoE, RouterConfig, TopKRouting
from modelmill.nn.moe_spec import MoESpec
from modelmill.ops.cpu.common import build
from modelmill.ops.registry import select_backends
from modelmill.weights.base import pack_as_format

EXPERTS, HIDDEN, INNER = 8, 32, 48
STEP: Any = SimpleNamespace(ops=select_backends("cpu"))  # nothing else of a step is read


def routing_by_hand(
    logits: list[float], bias: list[float] | None, config: RouterConfig
) -> list[float]:
    """One token's weights, with numbers and loops (arXiv:2412.19437, section 2.1.2)."""
    row = torch.tensor(logits, dtype=torch.float64)
    scores = (row.softmax(0) if config.scores == SOFTMAX else row.sigmoid()).tolist()
    ranked = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
    size = len(scores) // config.groups
    groups = [ranked[i * size : (i + 1) * size] for i in range(config.groups)]
    order = sorted(range(config.groups), key=lambda g: -sum(sorted(groups[g])[-2:]))
    top_groups = order[: config.top_groups] if config.groups > 1 else order
    allowed = [e for e in range(len(scores)) if e // size in top_groups]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: config.top_k]
    total = sum(scores[e] for e in chosen) if config.renormalize else 1.0
    return [scores[e] / total * config.scale if e in chosen else 0.0 for e in range(len(scores))]


@pytest.mark.parametrize("selection_bias", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID])
def test_the_router_is_its_definition(
    scores: str, renormalize: bool, groups: tuple[int, int], selection_bias: bool
) -> None:
    config = RouterConfig(EXPERTS, 2, scores, renormalize, selection_bias, False, 1.5, *groups)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, EXPERTS, generator=draw) * 2
    bias = torch.randn(EXPERTS, generator=draw) * 0.5 if selection_bias else None
    module = TopKRouting(config)
    module.selection_bias = bias
    weights = module(logits, STEP)
    expected = [
        routing_by_hand(row, None if bias is None else bias.tolist(), config)
        for row in logits.tolist()
    ]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-7)
    assert ((weights > 0).sum(1) == 2).all()


def filled(spec: MoESpec, weight_format: str) -> MoE:
    """A seeded mixture whose experts are packed in a format."""
    moe, draw = spec.build_module(), torch.Generator().manual_seed(1)
    for module in moe.modules():
        if isinstance(module, Linear):
            matrix = torch.randn(module.shape, generator=draw) * module.shape[1] ** -0.5
            module.weight = (
                mxfp4_weight(matrix)
                if weight_format == "mxfp4"
                else pack_as_format(weight_format, matrix, torch.float32)
            )
    for name, buffer in list(moe.named_buffers()):
        if buffer.is_meta:
            parent, _, leaf = name.rpartition(".")
            value = torch.randn(buffer.shape, generator=draw) * HIDDEN**-0.5
            setattr(moe.get_submodule(parent), leaf, value)
    return moe


@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4", "w8a8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 100])
def test_grouped_tokens_give_what_single_experts_do(tokens: int, weight_format: str) -> None:
    router = RouterConfig(EXPERTS, 3)
    shared = MLPSpec(HIDDEN, 2 * INNER)
    moe = filled(MoESpec(router, MLPSpec(HIDDEN, INNER), shared, shared_gate=True), weight_format)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(FusedMoE(moe)(x, STEP), moe(x, STEP), rtol=1e-5, atol=1e-6)


def test_torch_computes_a_small_step_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has its threads again behind it, with the same values."""
    moe = filled(MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER)), "int8")
    module, counts = FusedMoE(moe), []
    forward = TopKRouting.forward

    def counting(*args: Any) -> torch.Tensor:
        counts.append(torch.get_num_threads())
        return forward(*args)

    monkeypatch.setattr(TopKRouting, "forward", counting)
    before, outputs = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for tokens in (1, 16, 17):
            x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
            outputs.append((module(x, STEP), module._run(x, STEP, None)))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    small = 1 if build.unavailable_reason("cpu") is None else 2
    assert counts == [small, 2, small, 2, 2, 2]
    assert all(torch.equal(a, b) for a, b in outputs)


def test_an_expert_without_tokens_is_not_read() -> None:
    moe = filled(MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER)), "dense")
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = moe(x, STEP)
    routing = moe.routing(moe.router(x, STEP), STEP)
    for index, expert in enumerate(moe.experts):
        if not routing[0, index]:
            del expert.gate_up_proj, expert.down_proj
    torch.testing.assert_close(FusedMoE(moe, stacks=False)(x, STEP), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 1 << 30))
def test_tokens_are_grouped_by_expert(tokens: int, experts: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    routing = torch.rand(tokens, experts, generator=draw)
    routing = routing * (torch.rand(tokens, experts, generator=draw) < 0.4)
    groups = tokens_by_expert(*routing.T.nonzero(as_tuple=True), experts)
    pairs = {(int(token), expert) for expert, rows in groups for token in rows}
    assert pairs == {(t, e) for t in range(tokens) for e in range(experts) if routing[t, e] > 0}
    assert [expert for expert, _ in groups] == sorted({expert for _, expert in pairs})
    assert all(rows.tolist() == sorted(rows.tolist()) for _, rows in groups)
