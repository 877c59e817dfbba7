"""Routing and grouped products of experts: blocks of tokens, faulty logits, whole mixtures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.ops import registry
from modelmill.ops.fused_moe import SwigluOaiParams
from modelmill.ops.fused_topk import FusedTopkInputs
from modelmill.ops.moe_align_block_size import NO_EXPERT, max_expert_blocks, moe_align_block_size
from tests.nn.test_moe import EXPERTS, HIDDEN, INNER, STEP, filled

GROUPED = (
    "router_gemm", "fused_topk", "fused_moe", "int8_fused_moe", "int4_fused_moe", "w8a8_fused_moe",
    "fp8_fused_moe", "mxfp4_fused_moe",
)  # fmt: skip

# imported before any test may say that kernels are not interpreted
KERNELS = {op: registry.implementations(op, ["triton"]).get("triton") for op in GROUPED}


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(0, 8), st.integers(0, 5),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_blocks_hold_the_pairs_of_one_expert_in_order(
    tokens: int, top_k: int, more: int, elsewhere: int, seed: int
) -> None:
    """elsewhere: experts of other ranks, whose pairs are left out."""
    experts, draw = top_k + more, torch.Generator().manual_seed(seed)
    total = experts + elsewhere
    ids = torch.stack([torch.randperm(total, generator=draw)[:top_k] for _ in range(tokens)])
    ids[ids >= experts] = NO_EXPERT
    block = 4
    order, owners = moe_align_block_size(ids.int(), block, experts)
    assert len(owners) == max_expert_blocks(tokens * top_k, block, experts)
    by_expert: dict[int, list[int]] = {}
    for part, owner in zip(order.split(block), owners.tolist(), strict=True):
        pairs = [pair for pair in part.tolist() if pair < tokens * top_k]
        assert bool(pairs) == (owner != NO_EXPERT)
        by_expert.setdefault(owner, []).extend(pairs)
    by_expert.pop(NO_EXPERT, None)
    assert list(by_expert) == sorted(by_expert)
    flat = ids.flatten().tolist()
    present = sorted(set(flat) - {NO_EXPERT})
    expected = {e: [i for i, each in enumerate(flat) if each == e] for e in present}
    assert by_expert == expected


@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("experts", [1, 2, 3])
def test_the_bound_of_the_blocks_is_reached_and_never_passed(block: int, experts: int) -> None:
    for pairs in range(1, 11):
        spreads = itertools.product(range(pairs + 1), repeat=experts)
        needed = [
            sum(-(-count // block) for count in spread)
            for spread in spreads
            if sum(spread) == pairs
        ]
        assert max(needed) == max_expert_blocks(pairs, block, experts)


# −∞ − −∞ is expected; NumPy warns
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_logits_that_are_not_numbers_still_choose_experts() -> None:
    """An id outside of the experts would be an address outside of the weights."""
    module = KERNELS["fused_topk"]
    if module is None or module.unavailable_reason("cpu") is not None:
        pytest.skip("Triton's interpreter is not available")
    logits = torch.full((3, 20), float("nan"))
    logits[1, 4] = 2.0
    logits[2] = float("-inf")
    _, ids = module.run(FusedTopkInputs(logits, None, 5))
    for row in ids.tolist():
        assert len(set(row)) == 5
        assert set(row) <= set(range(20))


@pytest.fixture(scope="module")
def fused_moe_step() -> Any:
    """A step on the CPU with the fused MoE ops of Triton's interpreter."""
    if any(each is None or each.unavailable_reason("cpu") is not None for each in KERNELS.values()):
        pytest.skip("Triton's interpreter is not available")
    return SimpleNamespace(ops=registry.select_backends("cpu", dict.fromkeys(GROUPED, "triton")))


@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4", "w8a8", "fp8", "mxfp4"])
def test_a_mixture_with_fused_moe_ops_is_the_plain_one(
    weight_format: str, fused_moe_step: Any
) -> None:
    router = RouterConfig(EXPERTS, 3, renormalize=False, scale=1.5)
    shared = MLPSpec(HIDDEN, 2 * INNER)
    spec = MoESpec(router, MLPSpec(HIDDEN, INNER - 16), shared, shared_gate=True)
    moe = filled(spec, weight_format)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = moe(x, STEP)
    fused = FusedMoE(moe, stacks=True)
    # a quantized value at the border of two codes may take either one
    atol = 2e-2 if weight_format in ("w8a8", "fp8") else 1e-5
    torch.testing.assert_close(fused(x, fused_moe_step), expected, rtol=1e-4, atol=atol)
    torch.testing.assert_close(moe(x, STEP), expected, rtol=0, atol=0)


@pytest.mark.parametrize("weight_format", ["int8", "mxfp4"])
@pytest.mark.parametrize(
    "switches", [{"clamp": SwigluOaiParams(1.702, 0.5)}, {"activation": "gelu_tanh"}]
)
def test_biases_and_gates_are_those_of_the_plain_mixture(
    weight_format: str, switches: dict[str, Any], fused_moe_step: Any
) -> None:
    router = RouterConfig(EXPERTS, 3, bias=True)
    spec = MoESpec(router, MLPSpec(HIDDEN, 2 * HIDDEN, bias=True, **switches))
    moe = filled(spec, weight_format)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = moe(x, STEP)
    fused = FusedMoE(moe, stacks=True)
    torch.testing.assert_close(fused(x, fused_moe_step), expected, rtol=1e-4, atol=1e-5)
    moe.router.bias[:] *= -50.0  # type: ignore[index, operator]
    other = moe(x, STEP)
    assert (other - expected).abs().max() > 1e-2, "the router's bias chooses other experts"
    torch.testing.assert_close(fused(x, fused_moe_step), other, rtol=1e-4, atol=1e-5)
    for expert in moe.experts:
        expert.down_proj.bias = None  # type: ignore[union-attr]
    assert (moe(x, STEP) - other).abs().max() > 1e-2, "the biases take part"


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("weight_format", ["dense", "int8", "w8a8"])
def test_experts_without_a_gate_are_those_of_the_plain_mixture(
    weight_format: str, tokens: int, fused_moe_step: Any
) -> None:
    expert = MLPSpec(HIDDEN, INNER - 16, gated=False, activation="relu2")
    spec = MoESpec(RouterConfig(EXPERTS, 3), expert, replace(expert, inner=2 * INNER))
    moe = filled(spec, weight_format)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = moe(x, STEP)
    fused = FusedMoE(moe, stacks=True)
    assert fused._stacked is not None
    assert fused._stacked.is_fused_moe_op_usable(x, fused_moe_step.ops)
    atol = 2e-2 if weight_format == "w8a8" else 1e-5
    torch.testing.assert_close(fused(x, fused_moe_step), expected, rtol=1e-4, atol=atol)


def test_other_activations_without_a_gate_have_no_fused_moe_op() -> None:
    expert = MLPSpec(HIDDEN, INNER, gated=False, activation="gelu")
    moe = filled(MoESpec(RouterConfig(EXPERTS, 3), expert), "dense")
    assert FusedMoE(moe, stacks=True)._stacked is None


@pytest.mark.parametrize("group_scores", [1, 2])
def test_groups_are_ranked_by_their_best_scores(group_scores: int, fused_moe_step: Any) -> None:
    """DeepSeek-V2 ranks a group by its best score, DeepSeek-V3 by the sum of the two best."""
    router = RouterConfig(12, 3, scale=4.0, groups=4, top_groups=2, group_scores=group_scores)
    moe = filled(MoESpec(router, MLPSpec(HIDDEN, INNER)), "dense")
    moe.router.weight *= 12.0  # logits far apart
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = moe(x, STEP)
    fused = FusedMoE(moe, stacks=True)
    assert fused._stacked is not None
    for step in (STEP, fused_moe_step):
        torch.testing.assert_close(fused(x, step), expected, rtol=1e-4, atol=1e-5)
    moe.routing.config = replace(router, group_scores=3 - group_scores)
    differ = ((moe(x, STEP) - expected).abs() > 1e-2).any(1)
    assert 0 < int(differ.sum()) < len(x), "some tokens have other groups then"


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["dense", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_a_cuda_graph_replays_another_routing(weight_format: str, tokens: int) -> None:
    draw = torch.Generator().manual_seed(tokens)
    moe = filled(MoESpec(RouterConfig(16, 4), MLPSpec(256, 128)), weight_format)
    for module in moe.modules():
        weight = getattr(module, "weight", None)
        if weight is not None:
            moved = weight.to("cuda")
            module.weight = moved.bfloat16() if isinstance(moved, torch.Tensor) else moved
    if weight_format == "dense":
        for expert in moe.experts:
            for linear in (expert.gate_up_proj, expert.down_proj):
                linear.weight = type(linear.weight)(linear.weight.weight.bfloat16())
    step: Any = SimpleNamespace(ops=registry.select_backends("cuda"))
    fused = FusedMoE(moe)
    states = [torch.randn(tokens, 256, generator=draw).bfloat16().cuda() for _ in range(2)]
    static = states[0].clone()
    fused(static, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(static, step)
    for x in states:
        static.copy_(x)
        graph.replay()
        expected = moe(x, step)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=3e-2)
