"""Stacked experts: their weights are views, and what no fused MoE op computes is not stacked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.nn.expert_stack import (
    FUSED_MOE_OPS,
    MAX_CPU_FUSED_MOE_TOKENS,
    STACKED_TENSORS,
    as_strided_stack,
    expert_gate_up_or_fc_proj,
    largest_dequantized_experts_bytes,
    stack_experts,
    stack_weights,
)
from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.linear import Linear
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import MoE, RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.ops import registry
from modelmill.ops.cpu.common import build
from modelmill.ops.fused_moe import SwigluOaiParams
from modelmill.weights.base import pack_as_format
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
            linear.weight = pack_as_format(
                weight_format, matrix, torch.float32, input_scale=input_scale
            )  # type: ignore[union-attr]
    return moe


def experts_linears(moe: MoE) -> list[Linear]:
    """The first products of all experts."""
    return [expert.gate_up_proj for expert in moe.experts]  # type: ignore[misc]


@pytest.mark.parametrize("weight_format", FUSED_MOE_OPS)
def test_an_expert_keeps_its_values_as_views_of_the_stack(weight_format: str) -> None:
    moe = mixture(weight_format)
    before = [linear.weight.dequantize() for linear in experts_linears(moe)]
    assert stack_experts(moe) is not None
    linears = experts_linears(moe)
    for linear, expected in zip(linears, before, strict=True):
        assert torch.equal(linear.weight.dequantize(), expected)
    for suffix in linears[0].weight.tensors().keys() & STACKED_TENSORS:
        storages = {
            linear.weight.tensors()[suffix].untyped_storage().data_ptr() for linear in linears
        }
        assert len(storages) == 1, suffix


def test_a_second_pass_finds_the_stack_of_the_first() -> None:
    moe = mixture("int8")
    first = stack_weights(experts_linears(moe))
    assert first is not None
    weights = [linear.weight for linear in experts_linears(moe)]
    second = stack_weights(experts_linears(moe))
    assert second is not None
    assert first["weight"].data_ptr() == second["weight"].data_ptr()
    assert first["weight"].shape == second["weight"].shape == (EXPERTS, 2 * INNER, HIDDEN)
    assert torch.equal(first["weight"], second["weight"])
    assert all(a is linear.weight for a, linear in zip(weights, experts_linears(moe), strict=True))


def test_views_in_another_order_are_no_stack() -> None:
    parts = list(torch.arange(12.0).view(3, 4).unbind())
    stack = as_strided_stack(parts)
    assert stack is not None
    assert torch.equal(stack, torch.arange(12.0).view(3, 4))
    assert as_strided_stack(parts[::-1]) is None
    assert as_strided_stack([parts[0], parts[2]]) is None
    assert as_strided_stack([parts[0], parts[1].clone()]) is None


def lying_in_one_storage(moe: MoE) -> MoE:
    """The same, whose experts' tensors are views of one storage, an expert behind the other."""
    experts = moe.local_expert_modules
    for linears in (
        [expert_gate_up_or_fc_proj(each) for each in experts],
        [e.down_proj for e in experts],
    ):
        tensors = [linear.weight.tensors() for linear in linears]
        for suffix in tensors[0].keys() & STACKED_TENSORS:
            # as much again behind each, as other tensors of an expert are in a file
            parts = torch.stack([torch.stack((each[suffix],) * 2) for each in tensors])
            for linear, part in zip(linears, parts, strict=True):
                linear.weight = replace(linear.weight, **{suffix: part[0]})
    return moe


def test_views_with_a_gap_behind_each_are_a_stack_where_they_are() -> None:
    data = torch.arange(24.0)
    parts = [data[first : first + 4].view(2, 2) for first in (1, 9, 17)]
    assert as_strided_stack(parts) is None
    stack = as_strided_stack(parts, apart=True)
    assert stack is not None
    assert torch.equal(stack, torch.stack(parts))
    assert stack.data_ptr() == parts[0].data_ptr()
    assert as_strided_stack([data[:4], data[2:6], data[4:8]], apart=True) is None, "they overlap"
    assert as_strided_stack([data[:4], data[8:12], data[12:16]], apart=True) is None
    assert as_strided_stack(parts[:1], apart=True) is not None


def test_in_place_nothing_is_copied() -> None:
    moe = mixture("int8")
    weights = [linear.weight for linear in experts_linears(moe)]
    assert stack_experts(moe, in_place=True) is None
    assert all(a is linear.weight for a, linear in zip(weights, experts_linears(moe), strict=True))
    together = lying_in_one_storage(moe)
    weights = [linear.weight for linear in experts_linears(together)]
    assert stack_experts(together, in_place=True) is not None
    assert all(a is linear.weight for a, linear in zip(weights, experts_linears(moe), strict=True))


def counted(calls: list[tuple[str, int]], op: str, **bound: Any) -> Any:
    """A step whose op notes its calls with their numbers of tokens; ``bound``: other ops."""

    def counting(first: Any, *rest: Any) -> torch.Tensor:
        calls.append((op, len(first if isinstance(first, torch.Tensor) else first.x)))
        return getattr(STEP.ops, op)(first, *rest)

    return SimpleNamespace(ops=STEP.ops.replace({op: counting, **bound}))


@pytest.mark.parametrize("weight_format", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("whole", [True, False])
def test_few_tokens_on_a_cpu_are_one_call(weight_format: str, whole: bool) -> None:
    """For all experts, or with the router as well."""
    if build.unavailable_reason("cpu") is not None:
        pytest.skip(str(build.unavailable_reason("cpu")))
    router, shared = RouterConfig(EXPERTS, 3, bias=True, logit_scale=0.5), MLPSpec(HIDDEN, INNER)
    spec = MoESpec(router, MLPSpec(HIDDEN, 2 * HIDDEN), shared, shared_gate=True)
    moe = lying_in_one_storage(filled(spec, weight_format))
    calls: list[tuple[str, int]] = []
    op = "routed_moe" if whole else FUSED_MOE_OPS[weight_format]
    step = counted(calls, op, **({} if whole else {"routed_moe": None}))
    fused = FusedMoE(moe)
    for tokens in (1, 2, MAX_CPU_FUSED_MOE_TOKENS, MAX_CPU_FUSED_MOE_TOKENS + 1):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(fused(x, step), moe(x, STEP), rtol=1e-4, atol=1e-5)
    assert calls == [(op, 1), (op, 2), (op, MAX_CPU_FUSED_MOE_TOKENS)]
    assert fused(x[:1].double(), STEP).dtype == torch.float64, "what the kernel does not serve"
    other = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    actual = fused(x[:3], step, other)
    torch.testing.assert_close(actual, moe(x[:3], STEP, other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_experts_without_a_gate_are_one_call_too(weight_format: str) -> None:
    if build.unavailable_reason("cpu") is not None:
        pytest.skip(str(build.unavailable_reason("cpu")))
    expert = MLPSpec(HIDDEN, 2 * HIDDEN, gated=False, activation="relu2", bias=True)
    moe = lying_in_one_storage(filled(MoESpec(RouterConfig(EXPERTS, 3), expert), weight_format))
    calls: list[tuple[str, int]] = []
    step, fused = counted(calls, "routed_moe"), FusedMoE(moe)
    for tokens in (1, 5):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
        torch.testing.assert_close(fused(x, step), moe(x, STEP), rtol=1e-4, atol=1e-5)
    assert calls == [("routed_moe", 1), ("routed_moe", 5)]


def test_a_router_that_got_other_operands_is_computed_with_them() -> None:
    if build.unavailable_reason("cpu") is not None:
        pytest.skip(str(build.unavailable_reason("cpu")))
    router = RouterConfig(EXPERTS, 3, selection_bias=True, expert_scale=True, bias=True)
    moe = lying_in_one_storage(filled(MoESpec(router, MLPSpec(HIDDEN, 2 * HIDDEN)), "int8"))
    calls: list[tuple[str, int]] = []
    step, fused = counted(calls, "routed_moe"), FusedMoE(moe)
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))

    def assert_is_plain() -> torch.Tensor:
        expected = moe(x, STEP)
        torch.testing.assert_close(fused(x, step), expected, rtol=1e-4, atol=1e-5)
        return expected

    before = assert_is_plain()
    for module, name in (
        (moe.router, "weight"), (moe.router, "bias"), (moe.routing, "selection_bias"),
        (moe.routing, "expert_scale"),
    ):  # fmt: skip
        setattr(module, name, getattr(module, name).flip(0) * 3.0)
        after = assert_is_plain()
        assert not torch.equal(after, before), name
        before = after
    moe.routing.config = replace(router, top_k=2, scale=3.0)
    assert not torch.equal(assert_is_plain(), before)
    assert len(calls) == 6


def test_what_no_fused_moe_op_computes_is_not_stacked() -> None:
    assert stack_experts(mixture("rptq")) is None
    assert stack_experts(with_input_scale("w8a8", 0.5)) is None, "a static range of each expert"
    assert stack_experts(with_input_scale("fp8", -1.0)) is None
    floats = stack_experts(with_input_scale("w8a8", -1.0))
    assert floats is not None
    assert floats.op == FUSED_MOE_OPS["int8"]
    assert stack_experts(mixture("dense", activation="gelu")) is None
    for switches in (
        {"bias": True},
        {"activation": "gelu_tanh"},
        {"clamp": SwigluOaiParams(1.702, 7.0)},
    ):
        assert stack_experts(mixture("dense", **switches)) is not None
    one_gate = mixture("dense", clamp=SwigluOaiParams(1.702, 7.0))
    one_gate.experts[1].act.clamp = SwigluOaiParams(1.702, 6.0)  # type: ignore[union-attr]
    assert stack_experts(one_gate) is None, "experts with two gates"
    mixed = mixture("dense")
    matrix = torch.zeros(2 * INNER, HIDDEN)
    experts_linears(mixed)[1].weight = pack_as_format("int8", matrix, torch.float32)
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
        linear.weight = pack_as_format("dense", torch.zeros(2 * INNER, HIDDEN), torch.float32)
    assert not fused(x, step).any()
    assert len(calls) == 1
    assert FusedMoE(moe)._stacked is None, "nothing is copied on a CPU"


@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4", "mxfp4"])
def test_memory_of_experts_in_16_bits_is_known(weight_format: str) -> None:
    """Of one matrix of the largest layer, where an op dequantizes and the GPU has room."""
    moe = filled(MoESpec(RouterConfig(EXPERTS, 2), MLPSpec(HIDDEN, INNER)), weight_format)
    rows, columns = moe.local_expert_modules[0].gate_up_proj.shape
    needed = 2 * EXPERTS * rows * columns
    expected = needed if weight_format in ("int4", "mxfp4") else 0
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), moe)
    assert largest_dequantized_experts_bytes(model, 32 * needed) == expected
    assert largest_dequantized_experts_bytes(model, 32 * needed - 1) == 0
    moe.keep_local_experts((0, 1))
    assert largest_dequantized_experts_bytes(model, 32 * needed) == expected // EXPERTS
