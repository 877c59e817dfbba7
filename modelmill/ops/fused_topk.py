"""The experts of each token and their weights, from the router's logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.moe_align_block_size import NO_EXPERT as NO_EXPERT

SOFTMAX, SIGMOID, SPARSE_MIXER = "softmax", "sigmoid", "sparse_mixer"
SCORE_FUNCTIONS = (SOFTMAX, SIGMOID, SPARSE_MIXER)
"""What an expert's score is: see ``FusedTopkInputs``."""


class FusedTopkInputs(NamedTuple):
    """The router's logits and how experts are chosen.

    Attributes:
        logits: [T, E] float32.
        bias: [E], added to the scores for the choice and not for the weights (arXiv:2408.15664), or
            None.
        top_k: experts of a token.
        scores: of SCORE_FUNCTIONS: the softmax of all logits, the sigmoid of each, SPARSE_MIXER's
            choice of one expert after the other (``sparse_mixer_topk``), which has no bias and no
            groups.
        renormalize: whether the weights of a token are divided by their sum.
        scale: factor of the weights.
        groups: the experts are divided into so many groups, of which a token has ``top_groups``;
            1: no groups.
        top_groups: see ``groups``.
        group_scores: groups are ranked by the sum of so many of their largest scores: two in
            DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), one in DeepSeek-V2.
        local_experts: the range of experts whose weights this rank has; None: all.
        jitter: the relative noise of SPARSE_MIXER's logits in training, from 0 up.
        sum_eps: added to the sum by which ``renormalize`` divides.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    scores: str = SOFTMAX
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
    local_experts: tuple[int, int] | None = None
    jitter: float = 0.0
    sum_eps: float = 0.0


DECLARATION = OpDeclaration(inputs=FusedTopkInputs)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}


def fused_topk(inputs: FusedTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the largest scores, in descending order.

    Returns:
        Weights [T, top_k] float32 and ids [T, top_k] int32. With ``local_experts`` ids count from
        its first, and experts outside of it are NO_EXPERT with the weight 0.
    """
    if inputs.scores == SPARSE_MIXER:
        weights, ids = sparse_mixer_topk(inputs.logits, inputs.top_k, inputs.jitter)
    else:
        weights, ids = _select_top_experts(inputs)
    if inputs.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + inputs.sum_eps)
    return map_to_local_experts(weights * inputs.scale, ids.int(), inputs.local_experts)


def _select_top_experts(inputs: FusedTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores [T, top_k] and ids [T, top_k] of the experts that rank first."""
    logits = inputs.logits
    scores = logits.sigmoid() if inputs.scores == SIGMOID else logits.softmax(-1)
    ranked = scores if inputs.bias is None else scores + inputs.bias.to(scores.dtype)
    if inputs.groups > 1:
        by_group = ranked.unflatten(1, (inputs.groups, -1))
        group_scores = by_group.topk(inputs.group_scores, dim=-1).values.sum(-1)
        groups = group_scores.topk(inputs.top_groups, dim=-1, sorted=False).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, groups, True)
        ranked = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    ids = ranked.topk(inputs.top_k, dim=-1).indices
    return scores.gather(1, ids), ids


def sparse_mixer_topk(
    logits: torch.Tensor, top_k: int, jitter: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best expert, then the best of the others, and so on (arXiv:2409.12136).

    A weight is the softmax over those logits that noise of ±``jitter`` could make the best one.

    Args:
        logits: [T, E].
        top_k: experts of a token.
        jitter: as in ``FusedTopkInputs``.

    Returns:
        Weights [T, top_k] and ids [T, top_k].
    """
    weights, ids = [], []
    remaining = logits
    for _ in range(top_k):
        best, index = remaining.max(-1, keepdim=True)
        distance = (best - logits) / logits.abs().maximum(best)
        rivals = remaining.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(rivals.softmax(-1).gather(1, index))
        ids.append(index)
        remaining = remaining.scatter(1, index, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1)


def map_to_local_experts(
    weights: torch.Tensor, ids: torch.Tensor, local_experts: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice of all experts as a rank with some of them returns it.

    Args:
        weights: [T, top_k].
        ids: [T, top_k], of all experts.
        local_experts: as in ``FusedTopkInputs``.
    """
    if local_experts is None:
        return weights, ids
    first, end = local_experts
    local = (ids >= first) & (ids < end)
    return torch.where(local, weights, 0.0), torch.where(local, ids - first, NO_EXPERT)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001  logits are float32
    """Every kind of scores, with and without bias, renormalization, groups and others' experts."""
    shapes: list[tuple[int, int, int, dict[str, Any]]] = [
        (1, 8, 2, {}),
        (3, 12, 4, {"renormalize": False}),
        (2, 16, 3, {"scores": SIGMOID, "scale": 2.5, "biased": True}),
        (2, 16, 4, {"scores": SIGMOID, "biased": True, "groups": 4, "top_groups": 2}),
        (3, 60, 6, {"groups": 6, "top_groups": 3, "group_scores": 1, "scale": 16.0}),
        (3, 60, 4, {"groups": 3, "top_groups": 1, "biased": True}),
        (2, 300, 6, {}),
        (3, 20, 4, {"scores": SIGMOID, "sum_eps": 0.5}),
        (5, 12, 3, {"local_experts": (4, 9)}),
        (3, 16, 4, {"scores": SIGMOID, "groups": 4, "top_groups": 2, "local_experts": (0, 5)}),
        (9, 16, 2, {"scores": SPARSE_MIXER, "jitter": 0.3, "renormalize": False}),
        (4, 40, 3, {"scores": SPARSE_MIXER, "jitter": 0.1, "local_experts": (7, 30)}),
    ]
    if device != "cpu":
        shapes += [(rows, 128, 8, {}) for rows in (1, 32, 4096)]
        shapes += [(rows, 512, 10, {}) for rows in (1, 64)]
        shapes += [(32, 256, 8, {"scores": SIGMOID, "biased": True, "groups": 8, "top_groups": 4})]
        shapes += [(32, 160, 6, {"groups": 8, "top_groups": 3, "group_scores": 1})]
    for rows, experts, top_k, switches in shapes:
        biased = switches.get("biased", False)
        rest = {name: value for name, value in switches.items() if name != "biased"}
        logits = randn(
            rows, experts, device=device, dtype=torch.float32, seed=rows + experts, scale=2.0
        )
        bias = randn(experts, device=device, dtype=torch.float32, seed=experts) if biased else None
        args = FusedTopkInputs(logits, bias, top_k, **rest)._asdict()
        moved = nbytes(logits, bias) + 8 * rows * top_k
        yield Case(f"{rows}x{experts}->{top_k} {' '.join(switches)}".strip(), args, moved)
