"""Layers with a norm in front of each branch: a mixer alone, or attention and MLP.

Mamba has the former; LLaMA, GPT-2 and many others have the latter. In a hybrid, a recurrence
takes the place of some layers' attention.
"""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import (
    LayerComponentSpecs,
    attention_norm_spec,
    make_layer_spec,
    mlp_norm_spec,
)
from modelmill.nn.layer_spec import LAYER_INPUTS, ROPE_VALUE_NAME, LayerSpec
from modelmill.nn.step import Step

PRE_NORM_LAYER_OUTPUTS = ("mlp_out", "attn.residual")
# the modules of a pre-norm layer outside its MLP, with what each reads
PRE_NORM_DATAFLOW = [
    ("attn_norm", LAYER_INPUTS),
    ("attn.qkv_proj", ("attn_input",)),
    ("attn.rope_cache", ("qkv", ROPE_VALUE_NAME)),
    ("attn.core", ("q",)),
    ("attn.o_proj", ("attn",)),
    ("mlp_norm", ("attn_out", "stream")),
]


class MixerLayer(nn.Module):
    """norm → mixer, x + M(norm(x)); the residual travels beside the branch (Mamba).

    Layers with an MLP behind or beside the mixer derive from this class.

    Attributes:
        returns_whole_branch: Whether the ranks' partial sums of the branch have been added up.
    """

    returns_whole_branch = False
    spec: LayerSpec

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        """Make the modules; ``index``: the mixer's place among the KV caches or states."""
        super().__init__()
        self.spec = self.layer_spec(parts)
        self.attn_norm = parts.norm.build_module(reduces=not self.returns_whole_branch)
        self.attn = parts.attention.build_module(index)

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
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


class PreNormLayer(MixerLayer):
    """norm → attention → add and norm → MLP; the residual travels beside the branch."""

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        """Make the modules; ``index``: the mixer's place among the KV caches or states."""
        super().__init__(parts, index)
        self.mlp_norm = parts.norm.build_module()
        self.mlp = parts.mlp.build_module()

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of."""
        modules = (
            attention_norm_spec(parts.norm),
            *parts.attention.module_specs(),
            mlp_norm_spec(parts.norm, "attn_out"),
            *parts.mlp.module_specs(),
        )
        return make_layer_spec(parts, modules, PRE_NORM_LAYER_OUTPUTS)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn(x, rope, step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp(x, step), residual
