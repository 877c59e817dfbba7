"""A pre-norm layer whose branches are normed (GLM-4, Gemma 2) or scaled (Granite, MiniCPM).

``x + post(attention(norm(x)))``, then the same with the MLP. ``post`` is a norm or a factor.
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
from modelmill.nn.layer_spec import LayerSpec, ModuleSpec
from modelmill.nn.pre_norm import MixerLayer
from modelmill.nn.step import Step


class BranchScaler(nn.Module):
    """A branch times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H] → [T, H]."""
        return x * self.factor


class SandwichLayer(MixerLayer):
    """norm → attention → norm, add; norm → MLP → norm: the branches are normed before adding."""

    # the norms behind the branches have added up the ranks' partial sums
    returns_whole_branch = True

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        super().__init__(parts, index)
        self.attn_post = self.make_branch_epilogue(parts)
        self.mlp_norm = parts.norm.build_module(reduces=not self.returns_whole_branch)
        self.mlp = parts.mlp.build_module()
        self.mlp_post = self.make_branch_epilogue(parts)

    @staticmethod
    def make_branch_epilogue(parts: LayerComponentSpecs) -> nn.Module:
        """What a branch passes before it is added."""
        return parts.norm.build_norm_without_residual(reduces=True)

    @staticmethod
    def branch_epilogue_spec(
        parts: LayerComponentSpecs, path: str, reads: str, writes: str
    ) -> ModuleSpec:
        """What the layer declares of it."""
        return parts.norm.make_module_spec(path, (reads,), (writes,), path)

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of."""
        modules = (
            attention_norm_spec(parts.norm),
            *parts.attention.module_specs(),
            cls.branch_epilogue_spec(parts, "attn_post", "attn_out", "attn_branch"),
            mlp_norm_spec(parts.norm, "attn_branch"),
            *parts.mlp.module_specs(),
            cls.branch_epilogue_spec(parts, "mlp_post", "mlp_out", "mlp_branch"),
        )
        return make_layer_spec(parts, modules, ("mlp_branch", "attn.residual"))

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(branch, residual), both [T, H]; their sum is the layer's output."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn_post(self.attn(x, rope, step), step)
        x, residual = self.mlp_norm(x, residual, step)
        return self.mlp_post(self.mlp(x, step), step), residual


class ScaledBranchLayer(SandwichLayer):
    """A pre-norm layer with a factor on both branches."""

    returns_whole_branch = False

    @staticmethod
    def make_branch_epilogue(parts: LayerComponentSpecs) -> nn.Module:
        """The factor."""
        assert parts.branch_scale is not None, "branches are scaled"
        return BranchScaler(parts.branch_scale)

    @staticmethod
    def branch_epilogue_spec(
        parts: LayerComponentSpecs,  # noqa: ARG004
        path: str,
        reads: str,
        writes: str,
    ) -> ModuleSpec:
        """What the layer declares of it."""
        return ModuleSpec(
            path=path, reads=(reads,), writes=(writes,), reference=(path,), op="scale"
        )
