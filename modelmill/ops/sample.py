"""One token for each row of logits: temperature, top-k, top-p, min-p, and a draw by the row's
uniform number.

Probabilities are whole numbers, in units of 2^-40 of the likeliest token's. Sums of whole numbers
do not depend on the order of their terms, and the exponential below is a fixed sequence of IEEE
float32 operations (no fused multiply-add), so the same logits and numbers give the same ids in
every variant, at any batch size, on any device: exactly, not only nearly. What may differ between
devices is the last bit of the logits themselves. A token below 2^-40 of the likeliest one's
probability is never drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops.case import Case, nbytes, randn

# Ids are exact.
TOLERANCE = {torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0}
# the likeliest token weighs 2^40, so that rows of up to four million tokens fit into int64
FIXED_POINT_BITS = 40
LOG2E = 1.4426950408889634
# 2^f on [0, 1] to 2e-9, 1 at 0 and 2 at 1; float32 constants, lowest power first after the 1.
EXP2_COEFFICIENTS = (
    0.6931470632553101,
    0.2402293086051941,
    0.055485282093286514,
    0.00967545248568058,
    0.0012467841152101755,
    0.0002161293086828664,
)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Ids [B] int64 of rows logits [B, V] float32; one value a row in each of the others, all [B].

    temperature: float32, 0 takes the likeliest token, the lowest id where several are; the logits
    are multiplied by 1 over it. top_k: int32, 0 (or V and more)
    keeps all. top_p: float32, from 1 on keeps all. min_p: float32, 0 keeps all. noise: float64 in
    [0, 1).
    NaN counts as −inf; a row without a possible token gives id 0; of several +inf one is drawn.
    """
    left = token_weights(logits, temperature, top_k, top_p, min_p)
    running = left.cumsum(-1)
    total = running[:, -1:]
    target = torch.minimum((noise.double()[:, None] * total.double()).long(), total - 1)
    drawn = torch.searchsorted(running, target, right=True)[:, 0]
    likeliest = logits.nan_to_num(float("-inf"), float("inf"), float("-inf")).argmax(-1)
    return torch.where(temperature > 0, drawn, likeliest)


def token_weights(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """What the filters leave of each token's probability, [B, V] int64, 2^40 for the likeliest; as
    in ``sample``.

    One after another: top-k keeps what is not below the k-th largest, top-p the fewest of the
    likeliest tokens whose weights reach its share of what top-k left (of equal ones the lowest
    ids), min-p what weighs at least its share of the likeliest.
    """
    vocab = logits.shape[1]
    warm = torch.where(temperature > 0, temperature, 1.0).float()
    x = (
        logits.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
        * (1.0 / warm)[:, None]
    )
    most = x.amax(-1, keepdim=True)
    weight = _fixed_point_exp(x, most)
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()[:, None]
    p = top_p.double()[:, None]
    if x.is_cuda or bool(((k < vocab) | (p < 1)).any()):
        ranked = _top_sorted(x, weight, k, p)
        # rows whose k lies beyond what had to be ranked keep all
        kth = ranked.gather(1, k.clamp(max=ranked.shape[1]) - 1)
        weight = weight.masked_fill((x < kth) & (k < vocab), 0)
        limit = (p * weight.sum(-1, keepdim=True).double()).ceil().long()
        within = torch.where((ranked < kth) & (k < vocab), 0, _fixed_point_exp(ranked, most))
        inside = within.cumsum(-1) - within < limit
        last = ranked.gather(1, inside.sum(-1, keepdim=True).clamp(min=1) - 1)
        equal = x == last
        room = limit - torch.where(x > last, weight, 0).sum(-1, keepdim=True)
        taken = (equal.cumsum(-1) - 1) * _fixed_point_exp(last, most) < room
        weight = weight.masked_fill(((x < last) | (equal & ~taken)) & (p < 1), 0)
    least = (min_p.double() * 2.0**FIXED_POINT_BITS).ceil().long()[:, None]
    return torch.where(weight >= least, weight, 0)


def _fixed_point_exp(x: torch.Tensor, row_max: torch.Tensor) -> torch.Tensor:
    """exp(x − row_max) in units of 2^-40, rounded down, as int64; 0 for −inf. x: [B, N]; row_max:
    [B, 1], its maximum."""
    z = torch.where(x == row_max, 0.0, x - row_max).mul_(LOG2E).clamp_(min=-60.0)
    whole = z.floor()
    part = z.sub_(whole)
    power = part * EXP2_COEFFICIENTS[-1]
    for factor in EXP2_COEFFICIENTS[-2::-1]:
        power = power.add_(factor).mul_(part)
    bits = power.add_(1.0).mul_(2.0**23).long()
    shifted = (bits << (FIXED_POINT_BITS - 23)).bitwise_right_shift(-whole.long())
    return shifted.masked_fill_(x == float("-inf"), 0)


def _top_sorted(
    x: torch.Tensor, weight: torch.Tensor, k: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """The values of each row, falling; on a CPU only as many as the filters can reach."""
    vocab = x.shape[1]
    if not x.is_cuda:
        # a sort of the whole vocabulary takes milliseconds; what matters is nearly always among the
        # first few
        total = weight.sum(-1, keepdim=True).double()
        for first in (64, 1024):
            if first < vocab:
                ranked, order = x.topk(first, dim=-1)
                reached = weight.gather(1, order).sum(-1, keepdim=True).double() >= p * total
                if bool(((k <= first) | ((k == vocab) & ((p >= 1) | reached))).all()):
                    return ranked
    return x.sort(dim=-1, descending=True).values


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:  # noqa: ARG001 - logits are float32 in any model
    """Every filter alone and together, greedy rows among them; large vocabularies only on a GPU."""
    shapes = [(1, 97, 1.0), (5, 1000, 3.0), (3, 2049, 0.3)]
    if device != "cpu":
        shapes += [(1, 151936, 2.0), (8, 151936, 1.0), (7, 50257, 8.0)]
    for rows, vocab, scale in shapes:
        yield random_case(rows, vocab, device, scale)


def random_case(
    rows: int, vocab: int, device: str, scale: float = 1.0, sampling: int | None = None
) -> Case:
    """Rows that differ in what they ask for, or that all ask for mix ``sampling``."""
    mixes = (
        (0.8, 50, 0.9, 0.05),
        (1.0, 0, 0.95, 0.0),
        (1.3, 0, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.7, 20, 1.0, 0.0),
        (1.0, 3 * vocab // 4, 0.7, 0.0),
        (1.0, 0, 1.0, 0.1),
    )
    asked = [mixes[(i + vocab) % len(mixes) if sampling is None else sampling] for i in range(rows)]
    temperature, top_k, top_p, min_p = zip(*asked)
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
