"""A layer with norms behind its branches and none in front (OLMo 2 and 3, EXAONE 4).

``x + norm(attention(x))``, then ``x + norm(MLP(x))``.
"""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerComponentSpecs, make_layer_spec
from modelmill.nn.layer_spec import LAYER_INPUTS, LayerSpec, ModuleSpec
from modelmill.nn.norm import ResidualAdd
from modelmill.nn.step import Step


class PostNormLayer(nn.Module):
    """attention → norm, add; MLP → norm; the last sum is the next layer's."""

    returns_whole_branch = True
    spec: LayerSpec

    def __init__(self, parts: LayerComponentSpecs, cache_index: int) -> None:
        super().__init__()
        self.spec = self.layer_spec(parts)
        self.add = ResidualAdd(reduces=False)
        self.attn = parts.attention.build_module(cache_index)
        self.attn_post = parts.norm.build_norm_without_residual(reduces=True)
        self.attn_add = ResidualAdd(reduces=False)
        self.mlp = parts.mlp.build_module()
        self.mlp_post = parts.norm.build_norm_without_residual(reduces=True)

    @staticmethod
    def layer_spec(parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of."""
        norm = parts.norm
        modules = (
            _residual_add_spec("add", LAYER_INPUTS, "attn_input", "input"),
            *parts.attention.module_specs(),
            norm.make_module_spec("attn_post", ("attn_out",), ("attn_branch",), "attn_post"),
            _residual_add_spec(
                "attn_add", ("attn_branch", "attn_input"), "mlp_input", "post_attn_residual"
            ),
            *parts.mlp.module_specs(),
            norm.make_module_spec("mlp_post", ("mlp_out",), ("mlp_branch",), "mlp_post"),
        )
        return make_layer_spec(parts, modules, ("mlp_branch", "mlp_input"))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x = self.add(x, residual, step)
        branch = self.attn_post(self.attn(x, rope, step), step)
        x = self.attn_add(branch, x, step)
        return self.mlp_post(self.mlp(x, step), step), x


def _residual_add_spec(
    path: str, reads: tuple[str, ...], writes: str, reference: str
) -> ModuleSpec:
    return ModuleSpec(
        path=path,
        reads=reads,
        writes=(writes,),
        reference=(reference,),
        arithmetic="residual",
        op="add",
    )
