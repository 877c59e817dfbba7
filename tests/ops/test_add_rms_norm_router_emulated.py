"""add_rms_norm_router.cu on a CPU, launched by its own Python, against the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from modelmill.ops.add_rms_norm_router import (
    TOLERANCE,
    AddRMSNormRouterInputs,
    add_rms_norm_router,
)
from modelmill.ops.cuda.moe import add_rms_norm_router as kernel
from modelmill.ops.fused_topk import SIGMOID, SOFTMAX, SPARSE_MIXER, FusedTopkInputs
from tests.ops.emulation.cases import mistakes, slow_cases
from tests.ops.emulation.emulator import Emulator, memory_ranges, requires_emulation

pytestmark = requires_emulation
BF, HF = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """tokens, hidden, experts, top_k.

    biases: whether logits and choice have one each.
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype = BF
    scores: str = SOFTMAX
    renormalize: bool = True
    adds: bool = True
    biases: bool = False


def inputs_of(case: Case) -> AddRMSNormRouterInputs:
    """Drawn inputs, whose logits are far apart."""
    generator = torch.Generator().manual_seed(case.hidden + case.experts)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(case.dtype)

    rules = FusedTopkInputs(
        torch.empty(0, case.experts), None, case.top_k, case.scores, case.renormalize, 2.5
    )  # fmt: skip
    tokens = case.tokens, case.hidden
    return AddRMSNormRouterInputs(
        draw(*tokens), draw(*tokens, scale=3.0) if case.adds else None, draw(case.hidden) + 1, 1e-5,
        draw(case.experts, case.hidden, scale=2 * case.hidden**-0.5), rules,
        draw(case.experts) if case.biases else None,
        torch.randn(case.experts, generator=generator) if case.biases else None,
        0.5 if case.biases else 1.0,
    )  # fmt: skip


def is_right(emulator: Emulator, inputs: AddRMSNormRouterInputs) -> bool:
    """Whether the kernel gives what the reference gives, and ids of the same order."""
    dtype = inputs.x.dtype

    def wide(tensor: Any) -> Any:
        is_float = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        return tensor.double() if is_float else tensor

    rules = inputs.rules._replace(logits=inputs.rules.logits.double(), bias=wide(inputs.rules.bias))
    expected = add_rms_norm_router(AddRMSNormRouterInputs(*map(wide, inputs))._replace(rules=rules))
    residual = None if inputs.residual is None else inputs.residual.clone()
    branch = [inputs.x] if residual is None else [inputs.x, residual]
    emulator.preceding_writes = lambda name, arguments: memory_ranges(*branch)
    actual = kernel.run(inputs._replace(residual=residual))
    atol = TOLERANCE[dtype]
    return (
        torch.equal(actual.topk_ids, expected.topk_ids)
        and torch.allclose(actual.topk_weights.double(), expected.topk_weights, rtol=2e-2)
        and torch.allclose(actual.x.double(), expected.x, atol=atol, rtol=1e-2)
        and torch.allclose(actual.total.double(), expected.total, atol=atol, rtol=1e-2)
        and (residual is None or actual.total is residual)
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 64, 12, 3),
        Case(1, 72, 33, 4, HF, SIGMOID, biases=True),
        *slow_cases(
            Case(1, 96, 128, 8, adds=False),
            Case(3, 4096, 8, 2, renormalize=False),
            Case(1, 80, 100, 8, scores=SIGMOID, biases=True),
            Case(1, 2880, 32, 4, biases=True),
            Case(1, 64, 3, 3),
        ),
    ],
    ids=str,
)
def test_it_gives_what_the_reference_gives(emulator: Emulator, case: Case) -> None:
    inputs = inputs_of(case)
    assert kernel.supports(inputs)
    assert is_right(emulator, inputs)


def test_what_it_does_not_serve_is_refused() -> None:
    inputs = inputs_of(Case(2, 64, 12, 3))
    rules = inputs.rules
    assert kernel.supports(inputs)
    for change in (
        {"x": inputs.x.float()},
        {"x": inputs.x[:, ::2]},
        {"x": inputs.x.repeat(3, 1)},  # more tokens
        {"residual": inputs.x.T.contiguous().T},
        {"router": inputs.router.float()},
        {"router": inputs.router.repeat(11, 1)},  # more experts than warps
        {"selection_bias": torch.zeros(12, dtype=BF)},
        {"rules": rules._replace(groups=4, top_groups=2)},
        {"rules": rules._replace(local_experts=(0, 6))},
        {"rules": rules._replace(scores=SPARSE_MIXER)},
    ):
        assert not kernel.supports(inputs._replace(**change)), list(change)


def test_equal_and_missing_scores_rank_by_id(emulator: Emulator) -> None:
    inputs = inputs_of(Case(1, 64, 12, 5))
    router = torch.zeros_like(inputs.router)
    router[3] = float("nan")
    emulator.preceding_writes = lambda name, arguments: []
    rules = inputs.rules._replace(scores=SIGMOID, renormalize=False)
    assert inputs.residual is not None
    actual = kernel.run(
        inputs._replace(router=router, rules=rules, residual=inputs.residual.clone())
    )
    assert actual.topk_ids.tolist() == [[0, 1, 2, 4, 5]]


MISTAKES = {
    "the kernel in front not waited for": "    pdl_wait();\n",
    "the other blocks' logits not waited for": "    mbarrier_wait(logits_full, 0);\n",
    "the first block's barriers not waited for": "    cluster_wait();",
    "the row not waited for": ("barriers are there\n    __syncthreads();", "are there\n"),
    "the highest id of equal ones": ("other < expert", "other <= expert"),
    "one expert too few of a block": (
        "if (warp < count) send_logit", "if (warp < count - 1) send_logit",
    ),
    "eps forgotten": ("squares / K + w.eps", "squares / K + 0.5f"),
}  # fmt: skip


@pytest.mark.parametrize("change", mistakes(MISTAKES))
def test_the_emulation_sees_mistakes(emulator: Emulator, change: tuple[str, str]) -> None:
    case = Case(4, 64, 24, 3, renormalize=False)
    assert emulator.detects(change, lambda: is_right(emulator, inputs_of(case)))
