"""The experts of each token: one maximum after another, in one warp.

Computes: weights[M, top_k] and ids[M, top_k] of logits[M, E]
Dtypes: logits float32; weights float32; ids int32
Layout: row-major, contiguous rows
Range: any M; E ≤ 1024; groups ranked by one or two scores
Technique: one program of one warp for each token; each maximum is over keys of 64 bits, a score
    and the id behind it, so that no warp waits for another; PDL
Ops: fused_topk

Of equal scores the lower id comes first. A score of NaN ranks last, so that every slot gets a valid
id. Groups are ranked by comparing all pairs, and the experts of the others rank behind all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_topk import NO_EXPERT, SIGMOID, SPARSE_MIXER, FusedTopkInputs
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger

MAX_EXPERTS = 1024
NO_KEY = tl.constexpr(-(2**63))  # behind all keys
_SIGMOID, _SPARSE_MIXER = tl.constexpr(SIGMOID), tl.constexpr(SPARSE_MIXER)


def supports(inputs: FusedTopkInputs) -> bool:
    """Packed float32 logits, groups of one size."""
    logits, bias = inputs.logits, inputs.bias
    if inputs.scores == SPARSE_MIXER and (bias is not None or inputs.groups > 1):
        return False
    return (
        (inputs.groups == 1 or _supports_expert_groups(inputs))
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and 0 < inputs.top_k <= logits.shape[1] <= MAX_EXPERTS
        and len(logits) > 0
        and (bias is None or (bias.is_contiguous() and bias.dtype != torch.float64))
    )


def _supports_expert_groups(inputs: FusedTopkInputs) -> bool:
    size, rest = divmod(inputs.logits.shape[1], inputs.groups)
    return rest == 0 and inputs.group_scores in (1, 2) and size >= inputs.group_scores


def run(inputs: FusedTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op."""
    logits, bias, top_k = inputs.logits, inputs.bias, inputs.top_k
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    block = max(16, next_power_of_two(experts))
    pdl = pdl_launch_options(logits.device, tokens)
    group_size = experts // inputs.groups
    first, end = inputs.local_experts or (0, 0)
    constants = (
        top_k, inputs.scores, 2.0 * inputs.jitter, inputs.renormalize, bias is not None, first, end,
        NO_EXPERT, inputs.groups, inputs.top_groups, inputs.group_scores, group_size,
        next_power_of_two(inputs.groups), next_power_of_two(group_size), block, pdl["PDL"],
    )  # fmt: skip
    _launcher(
        (tokens, 1, 1), (logits, logits if bias is None else bias, weights, ids),
        (experts, float(inputs.scale), float(inputs.sum_eps)), (experts,), constants,
        {"num_warps": 1, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return weights, ids


@triton.jit
def _kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, experts, scale, sum_eps,
    TOP_K: tl.constexpr, SCORES: tl.constexpr, MASK_THRESHOLD: tl.constexpr,
    RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr, NONE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORES: tl.constexpr,
    GROUP_SIZE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * experts
    expert = tl.arange(0, BLOCK_E)
    inside = expert < experts
    pdl_wait_and_trigger(PDL)
    logit = tl.load(logits_ptr + expert, mask=inside, other=float("-inf"))
    largest = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - largest), axis=0)
    score = _expert_score(logit, largest, total, SCORES)
    ranked = _selection_score(score, bias_ptr, expert, inside, BIAS)
    if GROUPS > 1:
        group, in_group = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_S)
        member = group[:, None] * GROUP_SIZE + in_group[None, :]
        present = (group[:, None] < GROUPS) & (in_group[None, :] < GROUP_SIZE)
        member_logit = tl.load(logits_ptr + member, mask=present, other=float("-inf"))
        member_score = _expert_score(member_logit, largest, total, SCORES)
        member_ranked = _selection_score(member_score, bias_ptr, member, present, BIAS)
        member_ranked = tl.where(present, member_ranked, float("-inf"))
        allowed = _top_group_mask(member_ranked, group, in_group, GROUPS, TOP_GROUPS, GROUP_SCORES)
        ranked = _mask_other_groups(allowed, group, expert // GROUP_SIZE, ranked)
    # of two keys with one score that of the lower id is larger
    key = (_float_to_sortable_int(ranked).to(tl.int64) << 32) + (BLOCK_E - 1 - expert)
    key = tl.where(inside, key, NO_KEY)
    rank = tl.full([BLOCK_E], TOP_K, tl.int32)
    for slot in range(TOP_K):
        is_next = key == tl.max(key, axis=0)
        rank = tl.where(is_next, slot, rank)
        key = tl.where(is_next, NO_KEY, key)
    chosen = inside & (rank < TOP_K)
    weight = score
    if SCORES == _SPARSE_MIXER:
        weight = _sparse_mixer_weights(logit, rank, inside, TOP_K, MASK_THRESHOLD)
    if RENORMALIZE:
        weight = weight / (tl.sum(tl.where(chosen, weight, 0.0), axis=0) + sum_eps)
    place = token * TOP_K + rank
    if END > 0:  # other ranks have the other experts
        local = (expert >= FIRST) & (expert < END)
        weight = tl.where(local, weight, 0.0)
        expert = tl.where(local, expert - FIRST, NONE)
    tl.store(weights_ptr + place, weight * scale, mask=chosen)
    tl.store(ids_ptr + place, expert, mask=chosen)


@triton.jit
def _sparse_mixer_weights(logit, rank, inside, TOP_K: tl.constexpr, MASK_THRESHOLD: tl.constexpr):
    """SparseMixer's weight of each of the first experts, by their ranks."""
    weight = tl.zeros_like(logit)
    logit = tl.where(inside, logit, 0.0)
    for turn in tl.static_range(TOP_K):
        best = tl.sum(tl.where(rank == turn, logit, 0.0), axis=0)
        size = tl.maximum(tl.abs(logit), best)
        is_far = best - logit > MASK_THRESHOLD * size
        is_rival = inside & (rank >= turn) & (is_far == 0)
        total = tl.sum(tl.where(is_rival, tl.exp(logit - best), 0.0), axis=0)
        weight = tl.where(rank == turn, 1.0 / total, weight)
    return weight


@triton.jit
def _expert_score(logit, largest, total, SCORES: tl.constexpr):
    """The score of each expert."""
    if SCORES == _SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    elif SCORES == _SPARSE_MIXER:  # noqa: RET505  Triton needs all branches
        return logit
    else:
        return tl.exp(logit - largest) / total


@triton.jit
def _selection_score(score, bias_ptr, expert, inside, BIAS: tl.constexpr):
    """What experts are chosen by; −∞ instead of NaN."""
    if BIAS:
        score += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def _float_to_sortable_int(value):
    """Float32 but NaN as integers in the same order; −0 and 0 are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _top_group_mask(
    ranked, group, in_group,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_SCORES: tl.constexpr,
):  # fmt: skip
    """1 for each of the token's groups, else 0: [BLOCK_G], of what ranks [BLOCK_G, BLOCK_S]."""
    scores = tl.max(ranked, axis=1)
    if GROUP_SCORES == 2:
        places = tl.where(ranked == scores[:, None], in_group[None, :], 1 << 20)
        others = in_group[None, :] != tl.min(places, axis=1)[:, None]
        scores += tl.max(tl.where(others, ranked, float("-inf")), axis=1)
    before = (scores[None, :] == scores[:, None]) & (group[None, :] < group[:, None])
    before = (before | (scores[None, :] > scores[:, None])) & (group[None, :] < GROUPS)
    return (tl.sum(before.to(tl.int32), axis=1) < TOP_GROUPS).to(tl.int32)


@triton.jit
def _mask_other_groups(allowed, group, group_of_expert, ranked):
    """What experts are chosen by; −∞ outside of the token's groups."""
    is_in = (group_of_expert[:, None] == group[None, :]).to(tl.int32)
    return tl.where(tl.sum(is_in * allowed[None, :], axis=1) > 0, ranked, float("-inf"))


_launcher = CachedLauncher(_kernel)
