"""The pre-norm layer: norm → attention → add and norm → MLP (LLaMA, GPT-2 and many others)."""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerParts, attention_norm_spec
from modelmill.nn.layer_spec import INPUTS, ROPE, LayerSpec
from modelmill.nn.step import Step

PRE_NORM_OUTPUTS = ("mlp_out", "attn.residual")
# the modules of a pre-norm layer outside its MLP, with what each reads
PRE_NORM_DATAFLOW = [
    ("attn_norm", INPUTS),
    ("attn.qkv_proj", ("attn_input",)),
    ("attn.rope_cache", ("qkv", ROPE)),
    ("attn.core", ("q",)),
    ("attn.o_proj", ("attn",)),
    ("mlp_norm", ("attn_out", "stream")),
]


class PreNormLayer(nn.Module):
    """norm → attention → add and norm → MLP; the residual travels beside the branch."""

    returns_whole_branch = False
    spec: LayerSpec

    def __init__(self, parts: LayerParts, cache_index: int) -> None:
        super().__init__()
        self.spec = self.layer_spec(parts)
        self.attn_norm = parts.norm.make()
        self.attn = parts.attention.make(cache_index)
        self.mlp_norm = parts.norm.make()
        self.mlp = parts.mlp.make()

    @staticmethod
    def layer_spec(parts: LayerParts) -> LayerSpec:
        """What such a layer is made of."""
        mlp_norm = parts.norm.spec(
            "mlp_norm",
            ("attn_out", "stream"),
            ("mlp_input", "attn.residual"),
            "mlp_norm",
            "post_attn_residual",
        )
        return LayerSpec(
            modules=(
                attention_norm_spec(parts.norm),
                *parts.attention.module_specs(),
                mlp_norm,
                *parts.mlp.module_specs(),
            ),
            sites=(*parts.attention.site_specs, *parts.mlp.site_specs()),
            outputs=PRE_NORM_OUTPUTS,
            partitions=(parts.attention.partition, *parts.mlp.partitions),
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn(x, rope, step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp(x, step), residual
