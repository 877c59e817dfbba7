"""Token embedding and the output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.linear import Linear
from modelmill.nn.step import Step


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
    """The projection to the vocabulary, in float32 sums cast to float32 logits."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[R, H] → [R, V] float32."""
        return super().forward(x, step).float()
