"""Token embedding and the output head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.norm import NormConfig
from modelmill.nn.step import Step
from modelmill.parallel.shard import Shard, partition, range_lengths
from modelmill.parallel.tp_group import TPGroup

_VOCAB_ALIGNMENT = 16  # tokens that a rank's share is a multiple of where there are many


class TokenEmbedding(nn.Module):
    """Rows by id, times ``scale``; tokens that bring their own embeddings (images) take those."""

    weight: torch.Tensor

    def __init__(self, rows: int, width: int, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("weight", torch.empty(rows, width, device="meta"))

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        """[T] → [T, H]."""
        x = F.embedding(ids, self.weight)
        if self.scale is not None:
            x = x * self.scale
        if step.embeds is not None and step.embed_mask is not None:
            x = torch.where(step.embed_mask[:, None], step.embeds.to(x.dtype), x)
        return x


class NormedEmbedding(TokenEmbedding):
    """Token rows, then a norm (BLOOM)."""

    def __init__(self, rows: int, width: int, norm: NormConfig) -> None:
        super().__init__(rows, width)
        self.norm = norm.build_norm_without_residual()

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        """[T] → [T, H]."""
        return self.norm(super().forward(ids, step), step)


class TokenAndPositionEmbedding(TokenEmbedding):
    """Token rows plus learned position rows; position p has row p + ``first_row``."""

    positions: torch.Tensor

    def __init__(self, rows: int, width: int, num_positions: int, first_row: int = 0) -> None:
        super().__init__(rows, width)
        self.first_row = first_row
        table = torch.empty(num_positions + first_row, width, device="meta")
        self.register_buffer("positions", table)

    def forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        """[T] → [T, H]."""
        rows = step.positions + self.first_row if self.first_row else step.positions
        return super().forward(ids, step) + F.embedding(rows, self.positions)


class LMHead(Linear):
    """The projection to the vocabulary, in float32 sums cast to float32 logits.

    With tensor parallelism each rank computes a part of the vocabulary and gathers all logits, so
    that every rank samples the same ids.

    Attributes:
        scale: Factor of the logits, or None.
        softcap: Bound that the logits approach, or None.
    """

    shard_widths: tuple[int, ...] = ()

    def __init__(
        self,
        width: int,
        vocab: int,
        bias: bool = False,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__(width, vocab, bias)
        self.scale, self.softcap = scale, softcap

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[R, H] → [R, V] float32."""
        logits = super().forward(x, step)
        if self.shard_widths:
            logits = step.tp_group.all_gather(logits, self.shard_widths)
        return self.scale_and_softcap_logits(logits.float())

    def scale_and_softcap_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What follows the product, of float32 logits [R, V]."""
        if self.scale is not None:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

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
        self.restrict_to_shard(Shard.from_rows(self.shape, parts[tp_group.rank]))
