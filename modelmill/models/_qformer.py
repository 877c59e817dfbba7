"""The Q-Former: learned queries that ask an image (Li et al. 2023, arXiv:2301.12597); the queries' branch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.conv import PlainNorm
from modelmill.nn.linear import Linear
from modelmill.nn.still import Still
from modelmill.ops.eight_bit import Quantized


@dataclass(frozen=True)
class QFormerSpec:
    """Sizes. every: each so many layers look at the image, beginning with the first. seen: the image tokens' width."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    inner: int = 3072
    seen: int = 1408
    every: int = 2
    queries: int = 32
    eps: float = 1e-12


class SelfPart(nn.Module):
    """query, key and value of one attention."""

    def __init__(self, width: int, seen: int) -> None:
        super().__init__()
        self.query = Linear(width, width, bias=True)
        self.key = Linear(seen, width, bias=True)
        self.value = Linear(seen, width, bias=True)


class Output(nn.Module):
    """Projection, residual, norm: BERT norms afterwards."""

    def __init__(self, inner: int, width: int, eps: float) -> None:
        super().__init__()
        self.dense = Linear(inner, width, bias=True)
        self.LayerNorm = PlainNorm(width, eps)

    def forward(self, x: torch.Tensor | Quantized, residual: torch.Tensor, still: Still) -> torch.Tensor:
        """x [B, T, inner], residual [B, T, C] → [B, T, C]."""
        norm = self.LayerNorm
        normed, _ = still.ops.add_layer_norm(still.linear(self.dense, x), residual, norm.weight, norm.bias, norm.eps)
        return normed


class Attention(nn.Module):
    """Of the queries to themselves, or to the image."""

    def __init__(self, spec: QFormerSpec, seen: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.self = SelfPart(spec.width, seen)
        self.output = Output(spec.width, spec.width, spec.eps)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, still: Still) -> torch.Tensor:
        """x [B, T, C], seen [B, S, seen] → [B, T, C]."""
        part = self.self
        q, k, v = (
            still.linear(layer, given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, given in ((part.query, x), (part.key, seen), (part.value, seen))
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.output(mixed, x, still)


class Up(nn.Module):
    """The first half of the feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense = Linear(width, inner, bias=True)


class Layer(nn.Module):
    """Attention among the queries, in some layers to the image, feed-forward."""

    def __init__(self, spec: QFormerSpec, index: int) -> None:
        super().__init__()
        self.attention = Attention(spec, spec.width)
        self.crossattention = Attention(spec, spec.seen) if index % spec.every == 0 else None
        self.intermediate_query = Up(spec.width, spec.inner)
        self.output_query = Output(spec.inner, spec.width, spec.eps)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, still: Still) -> torch.Tensor:
        """x [B, T, C], seen [B, S, seen] → [B, T, C]."""
        x = self.attention(x, x, still)
        if self.crossattention is not None:
            x = self.crossattention(x, seen, still)
        inner = still.gelu(self.intermediate_query.dense, x, self.output_query.dense)
        return self.output_query(inner, x, still)


class QFormer(nn.Module):
    """Image tokens to the answers of the queries."""

    query_tokens: torch.Tensor

    def __init__(self, spec: QFormerSpec) -> None:
        super().__init__()
        self.register_buffer("query_tokens", torch.empty(1, spec.queries, spec.width, device="meta"))
        self.norm = PlainNorm(spec.width, spec.eps)
        self.layer = nn.ModuleList(Layer(spec, i) for i in range(spec.depth))

    def forward(self, seen: torch.Tensor, still: Still) -> torch.Tensor:
        """[B, S, seen] → [B, 32, C]. The queries have no positions, but they are normed."""
        x = self.norm(self.query_tokens).expand(len(seen), -1, -1)
        for layer in self.layer:
            x = layer(x, seen, still)
        return x
