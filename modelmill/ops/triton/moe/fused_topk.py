"""The experts of each token by their ranks, all at once instead of one maximum after another.

Computes: weights[M, top_k] and ids[M, top_k] of logits[M, E]
Dtypes: logits float32; weights float32; ids int32
Layout: row-major, contiguous rows
Range: any M; E ≤ 1024, without groups of experts
Technique: one program for each token, ranks by comparing all pairs of experts, PDL
Ops: fused_topk

The rank of an expert is the number of experts with a larger score, or an equal one and a lower id.
A score of NaN ranks last, so that every slot gets a valid id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.fused_topk import NO_EXPERT, FusedTopkInputs
from modelmill.ops.triton.common.device import available as available
from modelmill.ops.triton.common.device import power_of_two
from modelmill.ops.triton.common.fast_launch import CachedLauncher
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait

MAX_EXPERTS = 1024
_MAX_COMPARED = 16384  # values of the comparison in registers at once


def supports(inputs: FusedTopkInputs) -> bool:
    """Packed float32 logits, one group."""
    logits, bias = inputs.logits, inputs.bias
    return (
        inputs.groups == 1
        and logits.dtype == torch.float32
        and logits.is_contiguous()
        and 0 < logits.shape[1] <= MAX_EXPERTS
        and len(logits) > 0
        and (bias is None or (bias.is_contiguous() and bias.dtype != torch.float64))
    )


def run(inputs: FusedTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the op."""
    logits, bias, top_k = inputs.logits, inputs.bias, inputs.top_k
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    block = max(16, power_of_two(experts))
    pdl = pdl_launch_options(logits.device, tokens)
    first, end = inputs.local_experts or (0, 0)
    constants = (
        top_k, inputs.sigmoid, inputs.renormalize, bias is not None, first, end, NO_EXPERT, block,
        min(block, _MAX_COMPARED // block), pdl["PDL"],
    )  # fmt: skip
    _launcher(
        (tokens, 1, 1), (logits, logits if bias is None else bias, weights, ids),
        (experts, float(inputs.scale)), (experts,), constants,
        {"num_warps": 4, "launch_pdl": pdl["launch_pdl"]},
    )  # fmt: skip
    return weights, ids


@triton.jit
def _kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, experts, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, END: tl.constexpr, NONE: tl.constexpr,
    BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * experts
    expert = tl.arange(0, BLOCK_E)
    inside = expert < experts
    pdl_wait(PDL)
    logit = tl.load(logits_ptr + expert, mask=inside, other=float("-inf"))
    largest = tl.max(logit, axis=0)
    total = tl.sum(tl.exp(logit - largest), axis=0)
    score = _score(logit, largest, total, SIGMOID)
    ranked = _ranked(score, bias_ptr, expert, inside, BIAS)
    rank = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, BLOCK_E, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < experts
        logit_there = tl.load(logits_ptr + other, mask=there, other=float("-inf"))
        score_there = _score(logit_there, largest, total, SIGMOID)
        against = _ranked(score_there, bias_ptr, other, there, BIAS)[None, :]
        before = (against == ranked[:, None]) & (other[None, :] < expert[:, None])
        before = (before | (against > ranked[:, None])) & there[None, :]
        rank += tl.sum(before.to(tl.int32), axis=1)
    chosen = inside & (rank < TOP_K)
    weight = score
    if RENORMALIZE:
        weight = weight / tl.sum(tl.where(chosen, score, 0.0), axis=0)
    slot = token * TOP_K + rank
    if END > 0:  # other ranks have the other experts
        local = (expert >= FIRST) & (expert < END)
        weight = tl.where(local, weight, 0.0)
        expert = tl.where(local, expert - FIRST, NONE)
    tl.store(weights_ptr + slot, weight * scale, mask=chosen)
    tl.store(ids_ptr + slot, expert, mask=chosen)


@triton.jit
def _score(logit, largest, total, SIGMOID: tl.constexpr):
    """The score of each expert."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    else:  # noqa: RET505  Triton needs both branches
        return tl.exp(logit - largest) / total


@triton.jit
def _ranked(score, bias_ptr, expert, inside, BIAS: tl.constexpr):
    """What experts are chosen by; −∞ instead of NaN."""
    if BIAS:
        score += tl.load(bias_ptr + expert, mask=inside, other=0.0).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


_launcher = CachedLauncher(_kernel)
