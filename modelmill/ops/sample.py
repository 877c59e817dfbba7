"""Sampling of one token per row of logits: temperature, top-k, top-p, min-p, random draw.

Probabilities are integers in units of 2^-40 of the most likely token's. Integer sums do not depend
on the order of their terms, and the exponential below is a fixed sequence of IEEE float32
operations (no fused multiply-add). So the same logits and random numbers give exactly the same ids
in every implementation, at any batch size, on any device. Only the logits themselves may differ
between devices in their last bit. A token below 2^-40 of the most likely one's probability is never
drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.row_op_support import RowOpSupportRange, make_row_op_problem

# Ids are exact.
TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}
# the weight of the most likely token is 2^40, so that sums over 4 million tokens fit into int64
FIXED_POINT_BITS = 40
LOG2E = 1.4426950408889634
# Polynomial of 2^f on [0, 1], error 2e-9, exact at 0 and 1; float32, lowest power first, after 1.
EXP2_COEFFICIENTS = (
    0.6931470632553101,
    0.2402293086051941,
    0.055485282093286514,
    0.00967545248568058,
    0.0012467841152101755,
    0.0002161293086828664,
)


class SampleInputs(NamedTuple):
    """Logits and the sampling parameters of each row.

    Attributes:
        logits: [B, V] float32.
        temperature: [B] float32; 0 selects the most likely token, the lowest id on a tie; otherwise
            logits are multiplied by 1 / temperature.
        top_k: [B] int32; 0 (or ≥ V) keeps all.
        top_p: [B] float32; ≥ 1 keeps all.
        min_p: [B] float32; 0 keeps all.
        noise: [B] float64 in [0, 1).
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    noise: torch.Tensor


DECLARATION = OpDeclaration(inputs=SampleInputs, problem=make_row_op_problem, guard=None)
SAMPLE_SUPPORT_RANGE = RowOpSupportRange(
    dtypes=(torch.float32,),
    operand_dtypes=(torch.float32, torch.int32, torch.float32, torch.float32, torch.float64),
)


def sample(inputs: SampleInputs) -> torch.Tensor:
    """Sample one token id per row.

    NaN counts as −inf. A row without a possible token gives id 0; among several +inf one is drawn.

    Returns:
        Ids [B] int64.
    """
    logits, temperature, top_k, top_p, min_p, noise = inputs
    weights = filtered_fixed_point_weights(logits, temperature, top_k, top_p, min_p)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum((noise.double()[:, None] * total.double()).long(), total - 1)
    drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
    greedy = logits.nan_to_num(float("-inf"), float("inf"), float("-inf")).argmax(-1)
    return torch.where(temperature > 0, drawn, greedy)


def filtered_fixed_point_weights(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Integer probabilities after the filters, [B, V] int64, 2^40 for the most likely token.

    Arguments as in ``sample``. Filters are applied in this order: top-k keeps tokens not below the
    k-th largest; top-p keeps the fewest most likely tokens whose weights reach its share of what
    top-k kept (lowest ids among equal ones); min-p keeps tokens with at least its share of the most
    likely one.
    """
    vocab = logits.shape[1]
    temperature_or_1 = torch.where(temperature > 0, temperature, 1.0).float()
    x = (
        logits.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
        * (1.0 / temperature_or_1)[:, None]
    )
    row_max = x.amax(-1, keepdim=True)
    weight = _fixed_point_exp(x, row_max)
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()[:, None]
    p = top_p.double()[:, None]
    if x.is_cuda or bool(((k < vocab) | (p < 1)).any()):
        ranked = _sorted_top_logit_values(x, weight, k, p)
        # k is clamped only in rows that keep all tokens
        kth = ranked.gather(1, k.clamp(max=ranked.shape[1]) - 1)
        weight = weight.masked_fill((x < kth) & (k < vocab), 0)
        limit = (p * weight.sum(-1, keepdim=True).double()).ceil().long()
        ranked_weight = torch.where(
            (ranked < kth) & (k < vocab), 0, _fixed_point_exp(ranked, row_max)
        )
        in_top_p = ranked_weight.cumsum(-1) - ranked_weight < limit
        last = ranked.gather(1, in_top_p.sum(-1, keepdim=True).clamp(min=1) - 1)
        is_last = x == last
        remaining = limit - torch.where(x > last, weight, 0).sum(-1, keepdim=True)
        fits = (is_last.cumsum(-1) - 1) * _fixed_point_exp(last, row_max) < remaining
        weight = weight.masked_fill(((x < last) | (is_last & ~fits)) & (p < 1), 0)
    min_weight = (min_p.double() * 2.0**FIXED_POINT_BITS).ceil().long()[:, None]
    return torch.where(weight >= min_weight, weight, 0)


def _fixed_point_exp(x: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """exp(x − row_max) in units of 2^-40, rounded down, as int64; 0 for −inf.

    x: [B, N]; row_max: [B, 1], its maximum.
    """
    z = torch.where(x == row_max, 0.0, x - row_max).mul_(LOG2E).clamp_(min=-60.0)
    whole = z.floor()
    part = z.sub_(whole)
    power = part * EXP2_COEFFICIENTS[-1]
    for factor in EXP2_COEFFICIENTS[-2::-1]:
        power = power.add_(factor).mul_(part)
    bits = power.add_(1.0).mul_(2.0**23).long()
    shifted = (bits << (FIXED_POINT_BITS - 23)).bitwise_right_shift(-whole.long())
    return shifted.masked_fill_(x == float("-inf"), 0)


def _sorted_top_logit_values(
    x: torch.Tensor, weight: torch.Tensor, k: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """The values of each row in descending order; on a CPU only as many as the filters need."""
    vocab = x.shape[1]
    if not x.is_cuda:
        # sorting the whole vocabulary takes milliseconds; a few values are nearly always enough
        total = weight.sum(-1, keepdim=True).double()
        for count in (64, 1024):
            if count < vocab:
                ranked, order = x.topk(count, dim=-1)
                reached = weight.gather(1, order).sum(-1, keepdim=True).double() >= p * total
                if bool(((k <= count) | ((k == vocab) & ((p >= 1) | reached))).all()):
                    return ranked
    return x.sort(dim=-1, descending=True).values


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001 - logits are float32 in any model
    """All filters alone and together, greedy rows among them; large vocabularies only on a GPU."""
    shapes = [(1, 97, 1.0), (5, 1000, 3.0), (3, 2049, 0.3)]
    if device != "cpu":
        shapes += [(1, 151936, 2.0), (8, 151936, 1.0), (7, 50257, 8.0)]
    for rows, vocab, scale in shapes:
        yield random_case(rows, vocab, device, scale)


def random_case(
    rows: int, vocab: int, device: str, scale: float = 1.0, sampling: int | None = None
) -> Case:
    """Rows with different sampling parameters, or all with those of mix ``sampling``."""
    mixes = (
        (0.8, 50, 0.9, 0.05),
        (1.0, 0, 0.95, 0.0),
        (1.3, 0, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.7, 20, 1.0, 0.0),
        (1.0, 3 * vocab // 4, 0.7, 0.0),
        (1.0, 0, 1.0, 0.1),
    )
    params = [
        mixes[(i + vocab) % len(mixes) if sampling is None else sampling] for i in range(rows)
    ]
    temperature, top_k, top_p, min_p = zip(*params)
    logits = randn(rows, vocab, device=device, dtype=torch.float32, seed=rows + vocab, scale=scale)
    args = {
        "logits": logits,
        "temperature": torch.tensor(temperature, device=device),
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=device),
        "top_p": torch.tensor(top_p, device=device),
        "min_p": torch.tensor(min_p, device=device),
        "noise": torch.rand(
            rows, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)
        ).to(device),
    }
    return Case(
        f"{rows}x{vocab}" + ("" if sampling is None else f"-mix{sampling}"), args, nbytes(logits)
    )
