"""A layer whose attention and MLP read the same stream side by side (GPT-J, GPT-NeoX, Phi, Falcon).

``x + attention(norm(x)) + MLP(norm(x))``, with one norm for both or one for each.
"""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerComponentSpecs, attention_norm_spec
from modelmill.nn.layer_spec import LayerSpec, ModuleSpec
from modelmill.nn.pre_norm import MixerLayer
from modelmill.nn.step import Step


class BranchSum(nn.Module):
    """The sum of two branches; partial sums of several ranks stay partial."""

    def forward(self, attn: torch.Tensor, mlp: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H] → [T, H]."""
        return attn + mlp


class ParallelResidualLayer(MixerLayer):
    """norm → attention and (norm →) MLP, both branches added at once."""

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        super().__init__(parts, index)
        self.mlp_norm = parts.norm.build_norm_without_residual() if parts.mlp_norm else None
        self.mlp = parts.mlp.build_module()
        self.sum = BranchSum()

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of; with one norm, qkv and the MLP share a site."""
        reads, site = ("mlp_input", "up") if parts.mlp_norm else ("attn_input", "qkv")
        mlp_norm = parts.norm.make_module_spec("mlp_norm", ("stream",), ("mlp_input",), "mlp_norm")
        mlp_sites = parts.mlp.quant_sites()
        return LayerSpec(
            modules=(
                attention_norm_spec(parts.norm),
                *parts.attention.module_specs(),
                *((mlp_norm,) if parts.mlp_norm else ()),
                *parts.mlp.module_specs(reads, site),
                ModuleSpec(
                    path="sum",
                    reads=("attn_out", "mlp_out"),
                    writes=("branches",),
                    reference=("branches",),
                    arithmetic="residual",
                    op="add",
                ),
            ),
            sites=(*parts.attention.quant_sites, *(mlp_sites if parts.mlp_norm else mlp_sites[1:])),
            outputs=("branches", "stream"),
            partitions=(parts.attention.partition, *parts.mlp.partitions),
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        mlp_input = x if self.mlp_norm is None else self.mlp_norm(residual, step)
        branches = self.sum(self.attn(x, rope, step), self.mlp(mlp_input, step), step)
        return branches, residual
