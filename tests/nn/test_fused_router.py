"""The norm with the router in one op: used where it may be, and the same experts' outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.fused_router import FusedNormRouter
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import MoE, RouterConfig
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.norm import RMSNorm
from modelmill.ops.add_rms_norm_router import (
    MAX_TOKENS,
    AddRMSNormRouterInputs,
    RoutedTokens,
    add_rms_norm_router,
)
from modelmill.ops.cpu.common import build
from modelmill.parallel.tp_group import SINGLE_RANK
from tests.nn.test_expert_stack import lying_in_one_storage
from tests.nn.test_moe import EXPERTS, HIDDEN, STEP, filled

pytestmark = pytest.mark.skipif(
    build.unavailable_reason("cpu") is not None, reason=str(build.unavailable_reason("cpu"))
)


class Counted:
    """The op; ``calls`` has the tokens of each call."""

    def __init__(self, *, serves: bool = True) -> None:
        self.calls: list[int] = []
        self.serves = serves

    def __call__(self, inputs: AddRMSNormRouterInputs) -> RoutedTokens | None:
        self.calls.append(len(inputs.x))
        return add_rms_norm_router(inputs) if self.serves else None


def step_with(op: Counted, ranks: int = 1) -> Any:
    """A step with the op on so many ranks."""
    group = SINGLE_RANK if ranks == 1 else SimpleNamespace(size=ranks)
    return SimpleNamespace(
        ops=STEP.ops.replace({"add_rms_norm_router": op}),
        tp_group=group,
        is_graph_capturable=False,
    )


def mixture(**rules: Any) -> MoE:
    """A seeded mixture with a shared expert, whose experts the CPU's kernel multiplies."""
    router = RouterConfig(EXPERTS, 3, bias=True, selection_bias=True, logit_scale=0.5, **rules)
    shared = MLPSpec(HIDDEN, 2 * HIDDEN)
    spec = MoESpec(router, MLPSpec(HIDDEN, 2 * HIDDEN), shared, shared_gate=True)
    return lying_in_one_storage(filled(spec, "int8"))


def norm() -> RMSNorm:
    made = RMSNorm(HIDDEN, 1e-5)
    made.weight = torch.linspace(0.5, 1.5, HIDDEN)
    return made


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A branch and the stream."""
    drawn = torch.randn(2, count, HIDDEN, generator=torch.Generator().manual_seed(count))
    return drawn[0], drawn[1]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("count", [1, MAX_TOKENS])
def test_it_is_what_norm_and_mixture_give(count: int, added: bool) -> None:
    """added: the branch was added to the stream before."""
    moe, op = mixture(), Counted()
    fused = FusedMoE(moe)
    branch, stream = tokens(count)
    x, expected_stream = (
        norm()(stream, None, STEP) if added else norm()(branch, stream.clone(), step_with(op))
    )
    expected = moe(x, STEP)
    args = (None, stream) if added else (branch, stream.clone())
    routed, total = FusedNormRouter(norm(), fused)(*args, step_with(op))
    assert isinstance(routed, RoutedTokens)
    assert op.calls == [count]
    torch.testing.assert_close(total, expected_stream)
    torch.testing.assert_close(fused(routed, step_with(op)), expected, rtol=1e-4, atol=1e-5)


def replaced_weight(moe: MoE) -> MoE:
    """An expert that is none of the stack."""
    expert: Any = moe.experts[0]
    expert.gate_up_proj.weight = mixture().experts[0].gate_up_proj.weight  # type: ignore[union-attr]
    return moe


def test_an_op_that_does_not_serve_is_no_choice() -> None:
    op = Counted(serves=False)
    routed, _ = FusedNormRouter(norm(), FusedMoE(mixture()))(*tokens(2), step_with(op))
    assert isinstance(routed, torch.Tensor)
    assert op.calls == [2]


@pytest.mark.parametrize("what", ["tokens", "expert factors", "other weights", "float64"])
def test_where_the_experts_have_no_such_input_it_is_not_called(what: str) -> None:
    moe = mixture(expert_scale=True) if what == "expert factors" else mixture()
    fused, op = FusedMoE(moe), Counted()
    if what == "other weights":
        replaced_weight(moe)
    branch, stream = tokens(MAX_TOKENS + 1 if what == "tokens" else 1)
    made = norm()
    if what == "float64":
        branch, stream, made.weight = branch.double(), stream.double(), made.weight.double()
    routed, _ = FusedNormRouter(made, fused)(branch, stream, step_with(op))
    assert isinstance(routed, torch.Tensor)
    assert op.calls == []


def test_several_ranks_add_up_their_parts_first() -> None:
    op, plain = Counted(), norm()
    step = step_with(op, ranks=2)
    reduced: list[torch.Tensor] = []
    step.tp_group.all_reduce_add_rms_norm = lambda run, x, residual, *rest, captured: (
        reduced.append(x),
        run(x, residual, *rest),
    )[1]
    FusedNormRouter(plain, FusedMoE(mixture()))(*tokens(1), step)
    assert op.calls == []
    assert len(reduced) == 1
