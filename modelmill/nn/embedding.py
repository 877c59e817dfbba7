"""Token embedding and the output head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.parallel.shard import Shard, partition, range_lengths
from modelmill.parallel.tp_group import TPGroup

_VOCAB_ALIGNMENT = 16  # tokens that a rank's share is a multiple of where there are many


class TokenEmbedding(nn.Module):
    """Rows by id; tokens that bring their own embeddings (images) take those instead."""

    weight: torch.Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(rows, width, device="meta"))

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        """[T] → [T, H]."""
        x = F.embedding(ids, self.weight)
        if step.embeds is not None and step.embed_mask is not None:
            x = torch.where(step.embed_mask[:, None], step.embeds.to(x.dtype), x)
        return x


class LMHead(Linear):
    """The projection to the vocabulary, in float32 sums cast to float32 logits.

    With tensor parallelism each rank computes a part of the vocabulary and gathers all logits, so
    that every rank samples the same ids.
    """

    shard_widths: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[R, H] → [R, V] float32."""
        logits = super().forward(x, step)
        return (
            step.tp_group.all_gather(logits, self.shard_widths) if self.shard_widths else logits
        ).float()

    def shard(self, tp_group: TPGroup, alignment_for: Callable[[str], int]) -> None:  # noqa: ARG002  its columns stay whole
        """Keep some rows of the vocabulary."""
        vocab = self.shape[0]
        parts = partition(
            vocab,
            tp_group.size,
            _VOCAB_ALIGNMENT if vocab >= 8 * tp_group.size * _VOCAB_ALIGNMENT else 1,
            "tokens of the vocabulary",
        )
        self.shard_widths = range_lengths(parts)
        self.take_shard(Shard.from_rows(self.shape, parts[tp_group.rank]))
