"""Faults of SparseMixer: refused, with layer and module named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from modelmill.models import phimoe
from modelmill.ops import fused_topk
from tests.models.family_cases import Change, changed
from tests.models.moe_faults import ROUTING, with_router
from tests.models.planted_fault import PlantedFault, config_fault, refusal_test, tensor_fault

FAMILY = "phimoe"
# noise that decides in every layer, also between values that rounding has moved
CHANGES = {"router_jitter_noise": 0.4, "num_local_experts": 3}
real = fused_topk.sparse_mixer_topk
Choice = tuple[torch.Tensor, torch.Tensor]


def choice(change: Callable[[torch.Tensor, int, float], Choice]) -> PlantedFault:
    """Another choice of experts."""

    def plant() -> AbstractContextManager[Any]:
        return mock.patch.object(fused_topk, "sparse_mixer_topk", change)

    return plant, (ROUTING,), 0


def of_weights(change: Callable[[torch.Tensor], torch.Tensor]) -> PlantedFault:
    """The right experts with other weights."""

    def chosen(logits: torch.Tensor, top_k: int, jitter: float) -> Choice:
        weights, ids = real(logits, top_k, jitter)
        return change(weights), ids

    return choice(chosen)


def of_experts(change: Callable[[torch.Tensor, int], torch.Tensor]) -> PlantedFault:
    """The right weights of other experts."""

    def chosen(logits: torch.Tensor, top_k: int, jitter: float) -> Choice:
        weights, ids = real(logits, top_k, jitter)
        return weights, change(ids, logits.shape[1])

    return choice(chosen)


def distance_by(size: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> PlantedFault:
    """Rivals by a distance in relation to something else."""

    def chosen(logits: torch.Tensor, top_k: int, jitter: float) -> Choice:
        weights, ids, remaining = [], [], logits
        for _ in range(top_k):
            best, index = remaining.max(-1, keepdim=True)
            far = (best - logits) / size(logits, best) > 2 * jitter
            weights.append(remaining.masked_fill(far, float("-inf")).softmax(-1).gather(1, index))
            ids.append(index)
            remaining = remaining.scatter(1, index, float("-inf"))
        return torch.cat(weights, 1), torch.cat(ids, 1)

    return choice(chosen)


def with_first_among_rivals(logits: torch.Tensor, top_k: int, jitter: float) -> Choice:
    weights, ids = real(logits, top_k, jitter)
    pair = logits.gather(1, ids).softmax(-1)
    return torch.cat((weights[:, :1], pair[:, 1:]), 1), ids


def config(change: Change) -> PlantedFault:
    return config_fault(phimoe, changed(moe=change), (ROUTING,))


FAULTS: dict[str, PlantedFault] = {
    "softmax of all": config(with_router(scores="softmax")),
    "sigmoid": config(with_router(scores="sigmoid")),
    "half the noise": config(with_router(jitter=0.2)),
    "twice the noise": config(with_router(jitter=0.8)),
    "no noise": config(with_router(jitter=0.0)),
    "weights exchanged": of_weights(lambda w: w.flip(1)),
    "weights that sum to 1": of_weights(lambda w: w / w.sum(1, keepdim=True)),
    "second weight x 1.05": of_weights(lambda w: w * torch.tensor([1.0, 1.05])),
    "first expert twice": of_experts(lambda ids, count: ids[:, :1].expand(-1, 2)),
    "next expert": of_experts(lambda ids, count: (ids + 1) % count),
    "second expert dropped": of_weights(lambda w: w * torch.tensor([1.0, 0.0])),
    "distance as it is": distance_by(lambda logits, best: torch.ones_like(logits)),
    "distance by the logit alone": distance_by(lambda logits, best: logits.abs()),
    "first expert among the second's rivals": choice(with_first_among_rivals),
    "router of another order": tensor_fault(
        "layers.1.mlp.router.weight", lambda t: t.roll(1, 0), ("mlp.router",), 1
    ),
}


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
