"""What changes logits before a token is drawn: pure functions over [B, V] float32, one parameter per row."""

from __future__ import annotations

import torch

_NEVER = float("-inf")


def repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Tokens seen in prompt or answer: positive logits divided, negative ones multiplied (Keskar et al. 2019).

    seen: [B, V] bool. penalty: [B, 1].
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence(logits: torch.Tensor, counts: torch.Tensor, once: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    """Tokens of the answer: ``once`` off where they occur at all, ``each`` off per occurrence.

    counts: [B, V] whole numbers. once, each: [B, 1].
    """
    return logits - each * counts - once * (counts > 0)


def top_k(logits: torch.Tensor, k: torch.Tensor, largest: int) -> torch.Tensor:
    """Only tokens not below the k-th largest. k: [B] int64, 1 … ``largest``."""
    kth = logits.topk(largest, dim=-1).values.gather(1, k[:, None] - 1)
    return logits.masked_fill(logits < kth, _NEVER)


def top_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Only the smallest set of most likely tokens whose probability reaches p. p: [B, 1], below 1."""
    if not logits.is_cuda:
        # a sort of the whole vocabulary takes milliseconds; the set is nearly always among the first few
        whole = logits.logsumexp(-1, keepdim=True)
        for first in (64, 1024):
            if first < logits.shape[1]:
                values, order = logits.topk(first, dim=-1)
                if bool(((values - whole).exp().sum(-1, keepdim=True) >= p + 1e-4).all()):
                    return _nucleus(logits, (values - whole).exp(), order, p)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    return _nucleus(logits, values.softmax(-1), order, p)


def _nucleus(logits: torch.Tensor, likely: torch.Tensor, order: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """likely: probabilities of the tokens in ``order``, falling."""
    out = likely.cumsum(-1) - likely >= p
    gone = torch.ones_like(logits, dtype=torch.bool).scatter_(1, order, out)
    return logits.masked_fill(gone, _NEVER)


def min_p(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Only tokens at least ``p`` times as likely as the most likely one. p: [B, 1], 0 keeps all."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + p.log(), _NEVER)


def draw(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One token per row by inverting the distribution function in order of ids. noise: [B] in [0, 1). Returns [B]."""
    likely = logits.softmax(-1)
    running = likely.cumsum(-1)
    total = running[:, -1:]
    target = noise.to(torch.float32)[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    picked = torch.searchsorted(running, target, right=True).clamp_(max=logits.shape[1] - 1)
    # a parallel sum may step by a rounding error at a token that was filtered out
    return torch.where(likely.gather(1, picked) > 0, picked, likely.argmax(-1, keepdim=True))[:, 0]
