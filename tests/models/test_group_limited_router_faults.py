"""Faults of a router of sigmoids, groups and a bias: refused, with layer and module named.

A GLM-4.5 whose second layer alone has experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from modelmill.models import glm4_moe
from modelmill.ops import fused_topk
from tests.models.family_cases import changed
from tests.models.moe_faults import ROUTING, with_router
from tests.models.planted_fault import PlantedFault, config_fault, refusal_test, tensor_fault

FAMILY = "glm4_moe"
SCALE = 1.5
CHANGES = {"first_k_dense_replace": 1, "n_routed_experts": 9, "n_group": 3, "topk_group": 2,
           "moe_intermediate_size": 32}  # fmt: skip
Tensor = torch.Tensor


def selection(
    *,
    ranked: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda scores, bias, _: scores + bias,
    group_scores: Callable[[Tensor], Tensor] = lambda group: group.topk(2).values.sum(-1),
    by_group: Callable[[Tensor], Tensor] = lambda ranked: ranked,
    grouped_by: Callable[[Tensor, Tensor], Tensor] = lambda ranked, _: ranked,
    weights: Callable[[Tensor, Tensor], Tensor] = lambda scores, _: scores,
) -> PlantedFault:
    """Another choice of experts.

    Args:
        ranked: What experts are ranked by, from their scores, biases and logits.
        group_scores: What groups are ranked by, from their experts' ranks.
        by_group: Experts in the order of their groups.
        grouped_by: What the ranks of groups are made from, from ranks and scores.
        weights: The weights, from the scores and what experts are ranked by.
    """

    def select(inputs: Any) -> tuple[Tensor, Tensor]:
        scores = inputs.logits.sigmoid()
        order = ranked(scores, inputs.bias, inputs.logits)
        numbers = by_group(torch.arange(order.shape[1])[None])[0]
        groups = grouped_by(order, scores)[:, numbers].unflatten(1, (inputs.groups, -1))
        best = group_scores(groups).topk(inputs.top_groups).indices
        allowed = torch.zeros(len(order), inputs.groups, dtype=torch.bool).scatter_(1, best, True)
        mask = torch.zeros_like(order, dtype=torch.bool)
        mask[:, numbers] = allowed.repeat_interleave(groups.shape[2], 1)
        ids = order.masked_fill(~mask, float("-inf")).topk(inputs.top_k).indices
        return weights(scores, order).gather(1, ids), ids

    plant = lambda: mock.patch.object(fused_topk, "_select_top_experts", select)  # noqa: E731
    return plant, (ROUTING,), 1


def router(**changes: Any) -> PlantedFault:
    return config_fault(glm4_moe, changed(moe=with_router(**changes)), ROUTING, 1)


def bias(change: Callable[[Tensor], Tensor]) -> PlantedFault:
    return tensor_fault("layers.1.mlp.routing.selection_bias", change, ROUTING, 1)


def in_turns(numbers: Tensor) -> Tensor:
    return numbers.unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)


FAULTS: dict[str, PlantedFault] = {
    "softmax for sigmoid": router(scores="softmax"),
    "not renormalized": router(renormalize=False),
    "scale forgotten": router(scale=1.0),
    "scale twice": router(scale=SCALE**2),
    "scale x 1.05": router(scale=1.05 * SCALE),
    "one expert fewer": router(top_k=2),
    "no groups": router(groups=1, top_groups=1),
    "one group fewer": router(top_groups=1),
    "groups ranked by their best expert": router(group_scores=1),
    "groups ranked by their mean": selection(group_scores=lambda group: group.mean(-1)),
    "groups ranked by their last expert": selection(group_scores=lambda group: group.amin(-1)),
    "groups ranked without the bias": selection(grouped_by=lambda _, scores: scores),
    "experts divided into groups in turns": selection(by_group=in_turns),
    "bias in the weights, too": selection(weights=lambda _, ranked: ranked),
    "bias in front of the sigmoid": selection(ranked=lambda _, b, logits: (logits + b).sigmoid()),
    "bias forgotten": bias(torch.zeros_like),
    "bias subtracted": bias(torch.neg),
    "bias of other experts": bias(lambda t: t.roll(1)),
    "weights by the sum of all experts": selection(weights=lambda s, _: s.softmax(-1)),
    "router's rows in another order": tensor_fault(
        "layers.1.mlp.router.weight", lambda t: t.roll(1, 0), "mlp.router", 1
    ),
}  # fmt: skip


test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
