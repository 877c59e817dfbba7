"""Layers whose branches are scaled (Granite) or added (Falcon-H1) in the norm behind them.

The plain modules compute a factor or a sum of two branches by itself, in front of a norm that adds
the result to the residual. Here the norm's op does both (``branches_add_rms_norm``); where no
backend has it the plain modules run.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.causal_lm import CausalLM
from modelmill.nn.fused_module import FusedModule
from modelmill.nn.fused_moe import FusedMoE, FusedSwigluMLP
from modelmill.nn.mlp import GatedMLP
from modelmill.nn.moe import MoE
from modelmill.nn.norm import RMSNorm
from modelmill.nn.parallel_hybrid_layer import ParallelHybridLayer
from modelmill.nn.parallel_residual_layer import BranchSum
from modelmill.nn.sandwich import BranchScaler, ScaledBranchLayer
from modelmill.nn.step import Step
from modelmill.ops.branches_add_rms_norm import BranchesAddRMSNormInputs


def can_fuse_branches_into_norms(model: CausalLM) -> bool:
    """Whether all layers scale their branches, or all add two, in front of an RMSNorm."""
    kinds = {type(layer) for layer in model.layers}
    if kinds not in ({ScaledBranchLayer}, {ParallelHybridLayer}):
        return False
    return all(
        isinstance(norm, RMSNorm)
        for norm in (model.norm, *(layer.mlp_norm for layer in model.layers))
    )


class FusedBranchNormLM(FusedModule):
    """Token ids → logits, by layers whose norms combine the branches in front of them."""

    plain: CausalLM

    def __init__(self, plain: CausalLM) -> None:
        super().__init__(plain)
        last = plain.layers[-1]
        if isinstance(last, ScaledBranchLayer):
            self.layers = nn.ModuleList(map(FusedScaledBranchLayer, plain.layers))
            self.norm: nn.Module = BranchCombiningNorm(plain.norm, last.mlp_post)
        else:
            self.layers = nn.ModuleList(map(FusedParallelHybridLayer, plain.layers))

    def forward(self, step: Step) -> torch.Tensor:
        """Logits [R, V] float32 of the rows ``step.logit_rows``."""
        return self.plain.head(self.hidden_states(step), step)

    def hidden_states(self, step: Step) -> torch.Tensor:
        """The input of the head: normed final states [R, H] of the rows ``step.logit_rows``."""
        return self.plain.hidden_states_with_substitute_layers(self.layers, step, self.norm)


class BranchCombiningNorm(FusedModule):
    """A norm that combines one or two branches before it adds them to the residual."""

    plain: RMSNorm
    combine: BranchScaler | BranchSum

    def __init__(self, plain: nn.Module, combine: nn.Module) -> None:
        """combine: the plain module in front of the norm."""
        super().__init__(plain)
        object.__setattr__(self, "combine", combine)
        self.factor = combine.factor if isinstance(combine, BranchScaler) else 1.0

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        step: Step,
        other: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All [T, H]; residual None: x starts the stream, and is no branch."""
        norm, op = self.plain, step.ops.branches_add_rms_norm
        if residual is None:
            return norm.forward(x, None, step)
        if op is not None and step.tp_group.size == 1:
            inputs = BranchesAddRMSNormInputs(
                x, other, self.factor, residual, norm.weight, norm.eps
            )
            fused: tuple[torch.Tensor, torch.Tensor] | None = op(inputs)
            if fused is not None:
                return fused
        branches = (x,) if other is None else (x, other)
        return norm.forward(self.combine(*branches, step), residual, step)


class FusedBranchNormLayer(FusedModule):
    """A layer whose norms combine the branches in front of them.

    The norm in front of the MLP adds what the layer's mixers of tokens return. The MLP's own branch
    is returned as it is, for the next layer's first norm.
    """

    attn_norm: nn.Module
    attn: nn.Module

    def __init__(self, plain: ScaledBranchLayer | ParallelHybridLayer, mixed: nn.Module) -> None:
        """mixed: the plain module behind the mixers."""
        super().__init__(plain)
        self.mlp_norm = BranchCombiningNorm(plain.mlp_norm, mixed)
        self.mlp = _make_fused_mlp(plain.mlp)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]."""
        x, residual = self.attn_norm(x, residual, step)
        branch, beside = self.compute_mixer_branches(x, rope, step)
        x, residual = self.mlp_norm(branch, residual, step, beside)
        return self.mlp(x, step), residual

    def compute_mixer_branches(
        self, x: torch.Tensor, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The branch of the attention, and one beside it."""
        return self.attn(x, rope, step), None


class FusedScaledBranchLayer(FusedBranchNormLayer):
    """A layer whose branches are scaled by the norm behind them, the second by the next layer's."""

    def __init__(self, plain: nn.Module) -> None:
        layer = cast(ScaledBranchLayer, plain)
        super().__init__(layer, layer.attn_post)
        self.attn_norm = BranchCombiningNorm(layer.attn_norm, layer.mlp_post)


class FusedParallelHybridLayer(FusedBranchNormLayer):
    """A layer whose attention and Mamba2 are added by the norm behind them."""

    mamba: nn.Module

    def __init__(self, plain: nn.Module) -> None:
        layer = cast(ParallelHybridLayer, plain)
        super().__init__(layer, layer.sum)

    def compute_mixer_branches(
        self, x: torch.Tensor, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The branches of the attention and of the Mamba2."""
        return self.attn(x, rope, step), self.mamba(x, rope, step)


def _make_fused_mlp(mlp: nn.Module) -> nn.Module:
    """Grouped experts, SwiGLU in an epilogue, or the MLP as it is."""
    if isinstance(mlp, MoE):
        return FusedMoE(mlp)
    return FusedSwigluMLP(mlp) if isinstance(mlp, GatedMLP) else mlp
