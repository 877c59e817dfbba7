"""Language models whose layers are not pre-norm: only their experts are fused (nn/fused_moe.py).

All else is computed by the plain modules.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.fused_module import FusedModule
from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.moe import MoE
from modelmill.nn.moe_branch import MoEBranch
from modelmill.nn.scaled_sandwich import ScaledSandwichLayer
from modelmill.nn.step import Step


def is_moe_layer(layer: nn.Module) -> bool:
    """Whether a layer has experts, in the place of its MLP or beside it."""
    return _has_moe_branch(layer) or isinstance(getattr(layer, "mlp", None), MoE)


def _has_moe_branch(layer: nn.Module) -> bool:
    return isinstance(layer, ScaledSandwichLayer) and layer.experts is not None


class FusedMoELM(FusedModule):
    """Token ids → logits, by layers whose experts are fused."""

    plain: CausalLM

    def __init__(self, plain: CausalLM) -> None:
        super().__init__(plain)
        self.layers = nn.ModuleList(map(_fuse_experts, plain.layers))

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [R, V] float32 of the rows ``step.logit_rows``."""
        return self.plain.head(self.hidden_states(step), step)

    def hidden_states(self, step: Step) -> torch.Tensor:
        """The input of the head: normed final states [R, H] of the rows ``step.logit_rows``."""
        return self.plain.hidden_states_with_substitute_layers(self.layers, step)


def _fuse_experts(layer: nn.Module) -> nn.Module:
    """A layer with fused experts; one without experts as it is."""
    if _has_moe_branch(layer):
        return FusedMoEBranchLayer(cast(ScaledSandwichLayer, layer))
    if not is_moe_layer(layer):
        return layer
    # a copy that shares all modules but this one
    fused = copy.copy(layer)
    fused._modules = {**layer._modules, "mlp": FusedMoE(cast(MoE, layer.mlp))}
    return fused


class FusedMoEBranchLayer(FusedModule):
    """A layer of which the branch with the experts is fused."""

    plain: ScaledSandwichLayer

    def __init__(self, plain: ScaledSandwichLayer) -> None:
        super().__init__(plain)
        self.experts = FusedMoEBranch(cast(MoEBranch, plain.experts))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, None]:
        """The layer's output [T, H], and no residual beside it."""
        return self.plain.forward_with_replaced_experts(x, residual, rope, step, self.experts)


class FusedMoEBranch(FusedModule):
    """norm(MLP's output) + norm(experts of the stream), the experts' tokens grouped."""

    plain: MoEBranch

    def __init__(self, plain: MoEBranch) -> None:
        super().__init__(plain)
        self.moe = FusedMoE(plain.moe)

    def forward(self, mlp_out: torch.Tensor, stream: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H], the stream behind the attention [T, H] → [T, H]."""
        return self.plain.forward_replacing_moe(mlp_out, stream, step, self.moe)
