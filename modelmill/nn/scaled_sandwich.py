"""Gemma 4's layer: a sandwich that may have experts beside its MLP and an input of its own.

The stream behind it is multiplied by a learned number, so that the layer returns it whole.
"""

from __future__ import annotations

import torch
from torch import nn

from modelmill.nn.attention import RopeCosSin
from modelmill.nn.layer_parts import LayerComponentSpecs, attention_norm_spec, mlp_norm_spec
from modelmill.nn.layer_spec import LayerSpec, ModuleSpec
from modelmill.nn.norm import ResidualAdd
from modelmill.nn.sandwich import SandwichLayer
from modelmill.nn.step import Step


class LearnedScaleSum(nn.Module):
    """(branch + residual) times a learned number."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(1, device="meta"))

    def forward(self, branch: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H], [T, H] → [T, H]."""
        return (branch + residual) * self.scale


class ScaledSandwichLayer(SandwichLayer):
    """norm → attention → norm, add; norm → MLP (and experts) → norm, add; layer input; scale."""

    def __init__(self, parts: LayerComponentSpecs, index: int) -> None:
        super().__init__(parts, index)
        self.experts = None if parts.experts is None else parts.experts.build_module()
        if parts.experts is not None:  # they have added up the ranks' partial sums
            self.mlp_post = parts.norm.build_norm_without_residual()
        self.mlp_add = self.layer_input = None
        if parts.layer_input is not None:
            self.mlp_add = ResidualAdd(reduces=False)
            self.layer_input = parts.layer_input.build_module()
        self.output = LearnedScaleSum()

    @classmethod
    def layer_spec(cls, parts: LayerComponentSpecs) -> LayerSpec:
        """What such a layer is made of."""
        experts, layer_input = parts.experts, parts.layer_input
        branch = "mlp_out" if experts is None else "both_out"
        last = ("mlp_branch", "attn.residual")
        behind: tuple[ModuleSpec, ...] = ()
        if layer_input is not None:
            behind = (_residual_add_spec(last), *layer_input.module_specs("mlp.residual"))
            last = ("input_branch", "mlp.residual")
        modules = (
            attention_norm_spec(parts.norm),
            *parts.attention.module_specs(),
            cls.branch_epilogue_spec(parts, "attn_post", "attn_out", "attn_branch"),
            mlp_norm_spec(parts.norm, "attn_branch"),
            *parts.mlp.module_specs(),
            *(() if experts is None else experts.module_specs()),
            cls.branch_epilogue_spec(parts, "mlp_post", branch, "mlp_branch"),
            *behind,
            ModuleSpec(
                path="output", reads=last, writes=("output",), reference=("output",),
                arithmetic="residual", tensors=("scale",), op="add",
            ),
        )  # fmt: skip
        return LayerSpec(
            modules=modules,
            sites=(
                *parts.attention.quant_sites,
                *parts.mlp.quant_sites(),
                *(() if experts is None else experts.quant_sites),
                *(() if layer_input is None else layer_input.quant_sites),
            ),
            outputs=("output",),
            partitions=(
                parts.attention.partition,
                *parts.mlp.partitions,
                *(() if experts is None else experts.partitions),
            ),
        )

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: RopeCosSin, step: Step
    ) -> tuple[torch.Tensor, None]:
        """The layer's output [T, H], and no residual beside it."""
        return self.forward_with_replaced_experts(x, residual, rope, step, self.experts)

    def forward_with_replaced_experts(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rope: RopeCosSin,
        step: Step,
        experts: nn.Module | None,
    ) -> tuple[torch.Tensor, None]:
        """The same with these experts in the place of its own."""
        x, residual = self.attn_norm(x, residual, step)
        x = self.attn_post(self.attn(x, rope, step), step)
        x, residual = self.mlp_norm(x, residual, step)
        x = self.mlp(x, step)
        if experts is not None:
            x = experts(x, residual, step)
        x = self.mlp_post(x, step)
        if self.layer_input is not None and self.mlp_add is not None:
            residual = self.mlp_add(x, residual, step)
            x = self.layer_input(residual, step)
        return self.output(x, residual, step), None


def _residual_add_spec(reads: tuple[str, str]) -> ModuleSpec:
    return ModuleSpec(
        path="mlp_add", reads=reads, writes=("mlp.residual",), reference=("post_mlp_residual",),
        arithmetic="residual", op="add",
    )  # fmt: skip
