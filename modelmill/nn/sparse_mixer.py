"""SparseMixer's choice of two experts, one after the other (arXiv:2409.12136; Phi-3.5-MoE)."""

from __future__ import annotations

import torch

SPARSE_MIXER = "sparse_mixer"
NUM_CHOSEN = 2


def sparse_mixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, 2] and ids [T, 2] of the best expert and of the best of the others.

    A weight is the softmax over those logits that noise of ±``jitter`` could make the best one.

    Args:
        logits: [T, E] float32.
        jitter: Relative noise of the logits in training, from 0 up.
    """
    weights, ids = [], []
    remaining = logits
    for _ in range(NUM_CHOSEN):
        best, index = remaining.max(-1, keepdim=True)
        distance = (best - logits) / logits.abs().maximum(best)
        rivals = remaining.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(rivals.softmax(-1).gather(1, index))
        ids.append(index)
        remaining = remaining.scatter(1, index, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1)
