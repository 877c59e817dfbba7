"""Stacked experts: their own weights are views, and what no grouped op computes is not stacked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.nn.expert_stack import OPS, STACKED, stack_experts, stack_weights, stacked
from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import MoE, RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.ops import registry
from modelmill.ops.fused_moe import SwigluClamp
from modelmill.weights.base import pack
from tests.nn.test_moe import EXPERTS, HIDDEN, INNER, STEP, filled


def mixture(weight_format: str, **switches: Any) -> MoE:
    """A seeded mixture of one format."""
    return filled(
        MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER, **switches)), weight_format
    )


def with_input_scale(weight_format: str, input_scale: float) -> MoE:
    """The same whose weights say how their inputs are quantized."""
    moe = mixture(weight_format)
    for expert in moe.experts:
        for linear in (expert.gate_up_proj, expert.down_proj):
            matrix = torch.zeros(linear.shape)  # type: ignore[arg-type]
            linear.weight = pack(weight_format, matrix, torch.float32, input_scale=input_scale)  # type: ignore[union-attr]
    return moe


def experts_linears(moe: MoE) -> list[Linear]:
    """The first products of all experts."""
    return [expert.gate_up_proj for expert in moe.experts]  # type: ignore[misc]


@pytest.mark.parametrize("weight_format", OPS)
def test_an_expert_keeps_its_values_as_views_of_the_stack(weight_format: str) -> None:
    moe = mixture(weight_format)
    before = [linear.weight.dense() for linear in experts_linears(moe)]
    assert stack_experts(moe) is not None
    linears = experts_linears(moe)
    for linear, expected in zip(linears, before, strict=True):
        assert torch.equal(linear.weight.dense(), expected)
    for suffix in linears[0].weight.tensors().keys() & STACKED:
        storages = {
            linear.weight.tensors()[suffix].untyped_storage().data_ptr() for linear in linears
        }
        assert len(storages) == 1, suffix


def test_a_second_pass_finds_the_stack_of_the_first() -> None:
    moe = mixture("int8")
    first = stack_weights(experts_linears(moe))
    weights = [linear.weight for linear in experts_linears(moe)]
    second = stack_weights(experts_linears(moe))
    assert first["weight"].data_ptr() == second["weight"].data_ptr()
    assert first["weight"].shape == second["weight"].shape == (EXPERTS, 2 * INNER, HIDDEN)
    assert torch.equal(first["weight"], second["weight"])
    assert all(a is linear.weight for a, linear in zip(weights, experts_linears(moe), strict=True))


def test_views_in_another_order_are_no_stack() -> None:
    parts = list(torch.arange(12.0).view(3, 4).unbind())
    stack = stacked(parts)
    assert stack is not None
    assert torch.equal(stack, torch.arange(12.0).view(3, 4))
    assert stacked(parts[::-1]) is None
    assert stacked([parts[0], parts[2]]) is None
    assert stacked([parts[0], parts[1].clone()]) is None


def test_what_no_grouped_op_computes_is_not_stacked() -> None:
    assert stack_experts(mixture("rptq")) is None
    assert stack_experts(with_input_scale("w8a8", 0.5)) is None, "a static range of each expert"
    assert stack_experts(with_input_scale("fp8", -1.0)) is None
    floats = stack_experts(with_input_scale("w8a8", -1.0))
    assert floats is not None
    assert floats.op == OPS["int8"]
    assert stack_experts(mixture("dense", activation="gelu")) is None
    for switches in (
        {"bias": True},
        {"activation": "gelu_tanh"},
        {"clamp": SwigluClamp(1.702, 7.0)},
    ):
        assert stack_experts(mixture("dense", **switches)) is not None
    one_gate = mixture("dense", clamp=SwigluClamp(1.702, 7.0))
    one_gate.experts[1].act.clamp = SwigluClamp(1.702, 6.0)  # type: ignore[union-attr]
    assert stack_experts(one_gate) is None, "experts with two gates"
    mixed = mixture("dense")
    matrix = torch.zeros(2 * INNER, HIDDEN)
    experts_linears(mixed)[1].weight = pack("int8", matrix, torch.float32)
    assert stack_experts(mixed) is None


def test_a_replaced_weight_is_computed_and_not_the_stack() -> None:
    calls = []

    def grouped(inputs: Any) -> torch.Tensor:
        calls.append(inputs)
        return registry.reference("fused_moe")(inputs)

    ops = STEP.ops.replace({"fused_moe": grouped}, {**STEP.ops.backends, "fused_moe": "triton"})
    step: Any = SimpleNamespace(ops=ops)
    moe = mixture("dense")
    fused, x = FusedMoE(moe, stacks=True), torch.randn(3, HIDDEN)
    torch.testing.assert_close(fused(x, step), moe(x, STEP), rtol=1e-5, atol=1e-6)
    assert len(calls) == 1
    for linear in experts_linears(moe):
        linear.weight = pack("dense", torch.zeros(2 * INNER, HIDDEN), torch.float32)
    assert not fused(x, step).any()
    assert len(calls) == 1
    assert FusedMoE(moe)._stacked is None, "nothing is stacked on a CPU"
