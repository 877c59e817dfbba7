"""Token embedding and the output head."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step
from modelmill.ops.eight_bit import Quantized
from modelmill.parallel.mesh import Mesh
from modelmill.parallel.shard import Part, spread, widths

_LINE = 16  # tokens that a rank's share is a multiple of where there are many


class Embedding(nn.Module):
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


class Head(Linear):
    """The projection to the vocabulary, in float32 sums cast to float32 logits.

    Ranks share out the vocabulary, and each of them gets all logits: they sample alike, with nothing more to exchange.
    """

    widths: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor | Quantized, step: Step) -> torch.Tensor:
        """[R, H] → [R, V] float32."""
        logits = super().forward(x, step)
        return (step.mesh.gather(logits, self.widths) if self.widths else logits).float()

    def split(self, mesh: Mesh, grain: Callable[[str], int]) -> None:  # noqa: ARG002  its columns stay whole
        """Keep some rows of the vocabulary."""
        vocab = self.shape[0]
        parts = spread(vocab, mesh.size, _LINE if vocab >= 8 * mesh.size * _LINE else 1, "tokens of the vocabulary")
        self.widths = widths(parts)
        self.take(Part.of_rows(self.shape, parts[mesh.rank]))
