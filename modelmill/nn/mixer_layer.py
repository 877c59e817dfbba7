"""The layer of a norm and a mixer alone: x + M(norm(x)) (Mamba)."""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerParts, attention_norm_spec
from modelmill.nn.layer_spec import LayerSpec
from modelmill.nn.step import Step


class MixerLayer(nn.Module):
    """norm → mixer; the residual travels beside the branch. There is no MLP.

    Layers with an MLP behind or beside it derive from this class.

    Attributes:
        returns_whole_branch: Whether the ranks' partial sums of the branch have been added up.
    """

    returns_whole_branch = False
    spec: LayerSpec

    def __init__(self, parts: LayerParts, index: int) -> None:
        """Make the modules; ``index``: the mixer's place among the KV caches or states."""
        super().__init__()
        self.spec = self.layer_spec(parts)
        self.attn_norm = parts.norm.build_module(reduces=not self.returns_whole_branch)
        self.attn = parts.attention.build_module(index)

    @classmethod
    def layer_spec(cls, parts: LayerParts) -> LayerSpec:
        """What such a layer is made of."""
        return LayerSpec(
            modules=(attention_norm_spec(parts.norm), *parts.attention.module_specs()),
            sites=parts.attention.quant_sites,
            outputs=("attn_out", "stream"),
            partitions=(parts.attention.partition,),
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        return self.attn(x, rope, step), residual
