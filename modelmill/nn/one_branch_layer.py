"""The layer of a norm and one branch: x + B(norm(x)); B mixes tokens, or is an MLP (Nemotron-H).

Its norm is ``attn_norm`` in front of a mixer, ``mlp_norm`` in front of an MLP or experts.
"""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerComponentSpecs
from modelmill.nn.layer_spec import LAYER_INPUTS, LayerSpec
from modelmill.nn.pre_norm import MixerLayer
from modelmill.nn.step import Step


class OneBranchLayer(MixerLayer):
    """norm → mixer, or norm → MLP; the residual travels beside the branch."""

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        """Make the modules; ``index``: a mixer's place among the KV caches or states."""
        if parts.mixes_tokens:
            super().__init__(parts, index)
            return
        nn.Module.__init__(self)
        self.spec = self.layer_spec(parts)
        self.mlp_norm = parts.norm.build_module()
        self.mlp = parts.mlp.build_module()

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of."""
        if parts.mixes_tokens:
            return super().layer_spec(parts)
        norm = parts.norm.make_module_spec(
            "mlp_norm", LAYER_INPUTS, ("mlp_input", "stream"), "input_norm"
        )
        return LayerSpec(
            modules=(norm, *parts.mlp.module_specs()),
            sites=parts.mlp.quant_sites(),
            outputs=("mlp_out", "stream"),
            partitions=parts.mlp.partitions,
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        if hasattr(self, "attn"):
            return super().forward(x, residual, rope, step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp(x, step), residual
