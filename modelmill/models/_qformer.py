"""The Q-Former: learned queries that ask an image (Li et al.

2023, arXiv:2301.12597); the queries' branch alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from modelmill.nn.conv import VisionLayerNorm
from modelmill.nn.layer_spec import CompositeSpec, LayerSpec, LinearSpec, ModuleSpec
from modelmill.nn.linear import Linear
from modelmill.nn.partition import NO_PARTITIONS
from modelmill.nn.vision_context import VisionContext
from modelmill.nn.vit import (
    TransformerSizes,
    affine_norm_spec,
    biased_linear_spec,
    linear_input_sites,
)
from modelmill.ops.quant_types import QuantizedInput


@dataclass(frozen=True)
class QFormerSpec(TransformerSizes):
    """Sizes. image_width: the image tokens'.

    cross_attention_frequency: each so many layers look at the image, beginning with the first.
    """

    image_width: int = 1408
    cross_attention_frequency: int = 2
    queries: int = 32
    eps: float = 1e-12

    def has_cross_attention(self, layer: int) -> bool:
        """Whether a layer has cross-attention."""
        return layer % self.cross_attention_frequency == 0

    def layer_spec(self, layer: int) -> LayerSpec:
        """What a layer is made of."""
        wholes = [CompositeSpec("attention", "qformer.attention")]
        modules = _attention_module_specs("attention", "queries", "queries", self.width)
        x = "attention.output"
        if self.has_cross_attention(layer):
            wholes.append(CompositeSpec("crossattention", "qformer.crossattention"))
            modules += _attention_module_specs("crossattention", x, "image_tokens", self.width)
            x = "crossattention.output"
        modules += [
            _linear_spec("intermediate_query.dense", x, "qformer.up", self.inner),
            *_output_module_specs(
                "output_query", x, "qformer.down", "qformer.feed_forward", self.width
            ),
        ]
        return LayerSpec(
            modules=tuple(modules),
            sites=linear_input_sites(modules, heavy_tailed="output_query.dense.in"),
            outputs=("output_query",),
            partitions=NO_PARTITIONS,
            composites=(*wholes, CompositeSpec("", "qformer.layer")),
        )


QFORMER_BASE = QFormerSpec(768, 12, 12, 3072)


def _linear_spec(path: str, reads: str, reference: str, rows: int) -> LinearSpec:
    return biased_linear_spec(path, reads, f"{path}.out", reference, rows)


def _output_module_specs(
    path: str, residual: str, dense: str, branch: str, width: int
) -> list[ModuleSpec]:
    """The modules of a ``QFormerOutput``, which write the value of its path.

    dense, branch: their names in the reference.
    """
    reads = (f"{path}.dense.out", residual)
    norm = affine_norm_spec(f"{path}.LayerNorm", reads, (path,), f"{branch}.norm")
    return [_linear_spec(f"{path}.dense", f"{path}.dense.in", dense, width), norm]


def _attention_module_specs(path: str, x: str, context: str, width: int) -> list[ModuleSpec]:
    """The modules of a ``QFormerAttention`` of the value x to the value ``context``."""
    branch, reads = f"qformer.{path}", {"query": x, "key": context, "value": context}
    projections = [
        _linear_spec(f"{path}.self.{name}", value, f"{branch}.{name}", width)
        for name, value in reads.items()
    ]
    return [
        *projections,
        *_output_module_specs(f"{path}.output", x, f"{branch}.dense", branch, width),
    ]


class QFormerQKV(nn.Module):
    """query, key and value of one attention."""

    def __init__(self, width: int, kv_width: int) -> None:
        super().__init__()
        self.query = Linear(width, width, bias=True)
        self.key = Linear(kv_width, width, bias=True)
        self.value = Linear(kv_width, width, bias=True)


class QFormerOutput(nn.Module):
    """Projection, residual, norm: BERT norms afterwards."""

    def __init__(self, inner: int, width: int, eps: float) -> None:
        super().__init__()
        self.dense = Linear(inner, width, bias=True)
        self.LayerNorm = VisionLayerNorm(width, eps)

    def forward(
        self, x: torch.Tensor | QuantizedInput, residual: torch.Tensor, vision: VisionContext
    ) -> torch.Tensor:
        """[B, T, inner] and the residual [B, T, C] → [B, T, C]."""
        norm = self.LayerNorm
        normed, _ = vision.ops.add_layer_norm(
            vision.apply_linear(self.dense, x), residual, norm.weight, norm.bias, norm.eps
        )
        return normed


class QFormerAttention(nn.Module):
    """Of the queries to themselves, or to the image."""

    def __init__(self, spec: QFormerSpec, kv_width: int) -> None:
        super().__init__()
        self.heads = spec.heads
        self.self = QFormerQKV(spec.width, kv_width)
        self.output = QFormerOutput(spec.width, spec.width, spec.eps)

    def forward(
        self, x: torch.Tensor, context: torch.Tensor, vision: VisionContext
    ) -> torch.Tensor:
        """[B, T, C] and the context [B, S, kv_width] → [B, T, C]."""
        part = self.self
        q, k, v = (
            vision.apply_linear(layer, inputs).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, inputs in ((part.query, x), (part.key, context), (part.value, context))
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.output(mixed, x, vision)


class QFormerIntermediate(nn.Module):
    """The first half of the feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense = Linear(width, inner, bias=True)


class QFormerLayer(nn.Module):
    """Attention among the queries, in some layers to the image, feed-forward."""

    def __init__(self, spec: QFormerSpec, index: int) -> None:
        super().__init__()
        self.spec = spec.layer_spec(index)
        self.attention = QFormerAttention(spec, spec.width)
        self.crossattention = (
            QFormerAttention(spec, spec.image_width) if spec.has_cross_attention(index) else None
        )
        self.intermediate_query = QFormerIntermediate(spec.width, spec.inner)
        self.output_query = QFormerOutput(spec.inner, spec.width, spec.eps)

    def forward(
        self, x: torch.Tensor, image_tokens: torch.Tensor, vision: VisionContext
    ) -> torch.Tensor:
        """[B, T, C] and the image tokens [B, S, image_width] → [B, T, C]."""
        x = self.attention(x, x, vision)
        if self.crossattention is not None:
            x = self.crossattention(x, image_tokens, vision)
        inner = vision.apply_linear_gelu(self.intermediate_query.dense, x, self.output_query.dense)
        return self.output_query(inner, x, vision)


class QFormer(nn.Module):
    """Image tokens to the answers of the queries."""

    query_tokens: torch.Tensor

    def __init__(self, spec: QFormerSpec) -> None:
        super().__init__()
        self.register_buffer(
            "query_tokens", torch.empty(1, spec.queries, spec.width, device="meta")
        )
        self.norm = VisionLayerNorm(spec.width, spec.eps)
        self.layer = nn.ModuleList(QFormerLayer(spec, i) for i in range(spec.depth))

    def forward(self, image_tokens: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        """[B, S, image_width] → [B, 32, C]. The queries have no positions, but they are normed."""
        x = self.norm(self.query_tokens).expand(len(image_tokens), -1, -1)
        for layer in self.layer:
            x = layer(x, image_tokens, vision)
        return x
