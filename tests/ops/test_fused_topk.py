"""The choice of experts in every backend: edges that the op's cases do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelmill.ops import registry
from modelmill.ops.fused_topk import (
    SCORE_FUNCTIONS,
    SIGMOID,
    SPARSE_MIXER,
    FusedTopkInputs,
    fused_topk,
)

KERNELS = registry.implementations("fused_topk", ("triton", "cpu"))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Any:
    """A backend's implementation, on a CPU."""
    module = KERNELS[request.param]
    if (reason := module.unavailable_reason("cpu")) is not None:
        pytest.skip(reason)
    return module


@pytest.mark.parametrize("scores", SCORE_FUNCTIONS)
def test_many_of_an_odd_number_of_experts(kernel: Any, scores: str) -> None:
    logits = torch.randn(2, 37, generator=torch.Generator().manual_seed(1))
    inputs = FusedTopkInputs(logits, None, 19, scores, jitter=0.2)
    weights, ids = kernel.run(inputs)
    expected, expected_ids = fused_topk(inputs)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("scores", SCORE_FUNCTIONS)
def test_what_is_no_number_ranks_last(kernel: Any, scores: str) -> None:
    """Every slot gets another valid expert."""
    logits = torch.randn(4, 21, generator=torch.Generator().manual_seed(2))
    logits[0, 3], logits[1], logits[2, 5] = float("nan"), float("nan"), float("inf")
    logits[3] = float("-inf")
    weights, ids = kernel.run(FusedTopkInputs(logits, None, 20, scores, False))
    assert all(len(set(row)) == 20 and set(row) <= set(range(21)) for row in ids.tolist())
    if scores == SIGMOID:
        assert 3 not in ids[0]
        assert ids[2, 0] == 5
        assert not weights[0].isnan().any()


def test_of_a_zero_of_each_sign_the_lower_id_is_first(kernel: Any) -> None:
    logits = torch.tensor([[-0.0, -1.0, 0.0, -0.0], [-1.0, 0.0, -0.0, 0.0]])
    _, ids = kernel.run(FusedTopkInputs(logits, None, 3, SPARSE_MIXER, False, jitter=0.1))
    assert ids.tolist() == [[0, 2, 3], [1, 2, 3]]


def test_more_experts_than_there_are_cannot_be_chosen(kernel: Any) -> None:
    inputs = FusedTopkInputs(torch.zeros(2, 12), None, 12)
    assert kernel.supports(inputs)
    assert not kernel.supports(inputs._replace(top_k=13))
