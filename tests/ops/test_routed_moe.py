"""The CPU's choice of experts, and a whole mixture in one call against the ops that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import registry, routed_moe
from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.moe import fused_topk as topk_kernel
from modelmill.ops.fused_topk import SIGMOID, SOFTMAX, SPARSE_MIXER, FusedTopkInputs, fused_topk
from modelmill.ops.routed_moe import RoutedMoEWeights
from tests.ops.test_cpu_experts import DTYPES, operands
from tests.ops.test_cpu_kernels import isa as isa

pytestmark = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 20),
    groups=st.integers(1, 6),
    size=st.integers(2, 40),
    sigmoid=st.booleans(),
    renormalize=st.booleans(),
    group_scores=st.integers(1, 2),
    bias=st.sampled_from([None, *DTYPES]),
    seed=st.integers(0, 1 << 30),
)
def test_any_number_of_experts_and_groups(
    rows: int, groups: int, size: int, sigmoid: bool, renormalize: bool, group_scores: int,
    bias: torch.dtype | None, seed: int,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    experts, top_groups = groups * size, int(torch.randint(1, groups + 1, (), generator=draw))
    top_k = int(torch.randint(1, min(top_groups * size, 10) + 1, (), generator=draw))
    order = torch.stack([torch.randperm(experts, generator=draw) for _ in range(rows)])
    logits = order * (8.0 / experts)  # no two alike: the order of equal scores is not defined
    values = None if bias is None else torch.randn(experts, generator=draw).to(bias)
    scores = SIGMOID if sigmoid else SOFTMAX
    rules = (top_k, scores, renormalize, 1.5, groups, top_groups, group_scores)
    inputs = FusedTopkInputs(logits, values, *rules)
    assert topk_kernel.supports(inputs)
    weights, ids = topk_kernel.run(inputs)
    expected, expected_ids = fused_topk(inputs._replace(logits=logits.double()))
    exact = logits.double().sigmoid() if sigmoid else logits.double().softmax(1)
    if values is None:
        assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-4, atol=1e-6)
    if not renormalize:
        chosen = exact.gather(1, ids.long()) * 1.5
        torch.testing.assert_close(weights.double(), chosen, rtol=1e-5, atol=1e-7)


def test_logits_that_are_not_numbers_choose_valid_experts(isa: str) -> None:
    logits = torch.full((4, 21), float("nan"))
    logits[1, 4] = 2.0
    logits[2] = float("-inf")
    logits[3] = float("inf")
    for groups in (1, 3):
        for sigmoid in (False, True):
            inputs = FusedTopkInputs(
                logits, None, 5, SIGMOID if sigmoid else SOFTMAX, groups=groups
            )
            weights, ids = topk_kernel.run(inputs._replace(renormalize=False))
            assert all(len(set(row)) == 5 and set(row) <= set(range(21)) for row in ids.tolist())
            if sigmoid:
                assert ids[1, 0] == 4
                assert weights[3].tolist() == [1.0] * 5
            else:
                assert weights.isnan().all()


def test_of_equal_scores_the_lower_id_is_first() -> None:
    inputs = FusedTopkInputs(torch.zeros(2, 40), None, 9, groups=4, top_groups=3)
    weights, ids = topk_kernel.run(inputs)
    assert ids.tolist() == [list(range(9))] * 2
    torch.testing.assert_close(weights, torch.full((2, 9), 1 / 9))


@pytest.mark.parametrize("jitter", [0.0, 0.05, 0.4, 2.0])
@pytest.mark.parametrize("experts", [2, 5, 16, 21])
def test_sparse_mixer_is_that_of_the_definition(experts: int, jitter: float, isa: str) -> None:
    """Two experts, and three where there are so many; logits of both signs, and all below 0."""
    logits = torch.randn(40, experts, generator=torch.Generator().manual_seed(experts))
    logits[20:] = -logits[20:].abs()
    for top_k in (2, min(3, experts)):
        rules = FusedTopkInputs(logits, None, top_k, SPARSE_MIXER, False, jitter=jitter)
        assert topk_kernel.supports(rules)
        weights, ids = topk_kernel.run(rules)
        expected, expected_ids = fused_topk(rules)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_rules_that_the_kernel_does_not_have_are_left_to_the_reference() -> None:
    inputs = FusedTopkInputs(torch.zeros(2, 12), torch.zeros(12), 3)
    assert topk_kernel.supports(inputs)
    refused: tuple[dict[str, Any], ...] = (
        {"logits": torch.zeros(2, 12, dtype=torch.float64)},
        {"logits": torch.zeros(12, 2).T},
        {"bias": torch.zeros(12, dtype=torch.float64)},
        {"bias": torch.zeros(24)[::2]},
        {"groups": 5},
        {"groups": 4, "group_scores": 3},
        {"groups": 12, "group_scores": 2},
        {"top_k": 13},
        {"scores": SPARSE_MIXER},
    )
    for change in refused:
        assert not topk_kernel.supports(inputs._replace(**change)), change


def mixture(op: str, dtype: torch.dtype, tokens: int, **switches: Any) -> dict[str, Any]:
    """Seeded arguments of the op; ``switches``: fields of its weights and of the router's rules."""
    inputs = operands(op, (tokens, 160, 96, 8, 3), dtype)
    draw = torch.Generator().manual_seed(tokens)
    rules = FusedTopkInputs(torch.empty(0, 8), None, 3)
    named = {name: switches.pop(name) for name in rules._fields if name in switches}
    weights = RoutedMoEWeights(
        op, routed_moe.drop_tokens_keep_weights(inputs),
        (torch.randn(8, 160, generator=draw) * 0.3).to(dtype), rules._replace(**named), **switches,
    )  # fmt: skip
    other = torch.randn(tokens, 160, generator=draw).to(dtype)
    return {"x": inputs.x, "moe": weights, "router_input": other, "shared": inputs.shared}


@pytest.mark.parametrize("op", ["int8_fused_moe", "int4_fused_moe", "mxfp4_fused_moe"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_call_is_to_the_bit_what_the_single_ops_are(
    op: str, dtype: torch.dtype, isa: str
) -> None:
    factors = torch.linspace(0.5, 2.0, 8)
    switches: tuple[dict[str, Any], ...] = (
        {},
        {"router_bias": factors.to(dtype), "logit_scale": 0.5, "scale": 2.5},
        {"expert_scale": factors.flip(0).half(), "bias": factors.to(dtype), "scores": SIGMOID},
        {"groups": 4, "top_groups": 2, "group_scores": 1, "renormalize": False},
        {"scores": SPARSE_MIXER, "jitter": 0.2, "renormalize": False},
    )
    ops = registry.select_backends("cpu")
    for tokens in (1, 3, 16):
        for each in switches:
            args = mixture(op, dtype, tokens, **each)
            moe: RoutedMoEWeights = args["moe"]
            actual = ops.routed_moe(**args)
            logits = ops.router_gemm(args["router_input"], moe.router) * moe.logit_scale
            if moe.router_bias is not None:
                logits = logits + moe.router_bias.float()
            weights, ids = ops.fused_topk(moe.rules._replace(logits=logits))
            if moe.expert_scale is not None:
                weights = weights * moe.expert_scale.float()[ids.long()]
            experts = moe.experts._replace(
                x=args["x"], topk_weights=weights, topk_ids=ids, shared=args["shared"]
            )
            assert torch.equal(actual, getattr(ops, op)(experts))


def test_what_the_call_does_not_serve_is_left_to_the_single_ops() -> None:
    ops = registry.select_backends("cpu")
    args = mixture("int8_fused_moe", torch.bfloat16, 3)
    moe = args["moe"]
    assert ops.routed_moe(**args) is not None
    many = mixture("int8_fused_moe", torch.bfloat16, build.SMALL_M_LIMIT + 1)
    for change in (
        {"x": many["x"], "router_input": None, "shared": None},
        {"x": args["x"].float()},
        {"x": args["x"].repeat(1, 2)[:, ::2]},
        {"router_input": args["router_input"].float()},
        {"shared": args["x"].float()},
        {"moe": RoutedMoEWeights("fused_moe", moe.experts, moe.router, moe.rules)},
        {"moe": RoutedMoEWeights(moe.op, moe.experts, moe.router.float(), moe.rules)},
        {"moe": RoutedMoEWeights(moe.op, moe.experts, moe.router, moe.rules._replace(groups=5))},
        {"moe": RoutedMoEWeights("int4_fused_moe", moe.experts, moe.router, moe.rules)},
    ):
        assert ops.routed_moe(**(args | change)) is None, change.keys()
    replaced = registry.select_backends("cpu", {"fused_topk": "torch"})
    assert replaced.routed_moe is None, "an op that the user chose is not bypassed"
