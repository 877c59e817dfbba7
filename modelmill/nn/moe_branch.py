"""Experts beside a layer's MLP (Gemma 4): both read the stream, and their outputs are added.

The router reads the stream by a norm of its own, the experts by another. Each of the two branches
is normed before the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from modelmill.nn.layer_spec import LinearSpec, ModuleSpec, QuantSiteSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.norm import NormConfig
from modelmill.nn.partition import ExpertPartition
from modelmill.nn.step import Step

EXPERT_INNER_AXIS_NAME = "expert_inner"


@dataclass(frozen=True)
class MoEBranchSpec:
    """The experts, and the layer's norms.

    Attributes:
        moe: The experts; they have no shared expert, which is the layer's MLP.
        norm: All norms of the branch.
    """

    moe: MoESpec
    norm: NormConfig

    def build_module(self) -> MoEBranch:
        """The module."""
        return MoEBranch(self)

    @property
    def partitions(self) -> tuple[ExpertPartition, ...]:
        """How ranks divide the inner channels of each expert, or the experts."""
        return (self.moe.expert_partition(EXPERT_INNER_AXIS_NAME, "experts.moe"),)

    @property
    def quant_sites(self) -> tuple[QuantSiteSpec, ...]:
        """The inputs of each expert's products; scales are folded inside an expert only."""
        return tuple(
            site
            if site.producer is None
            else replace(
                site,
                producer=replace(
                    site.producer, linear=_moe_branch_module_path(site.producer.linear)
                ),
            )
            for site in self.moe.quant_sites()
        )

    def module_specs(self) -> tuple[ModuleSpec, ...]:
        """The modules of a layer's ``experts``: "mlp_out" and the stream → "both_out"."""
        norm, stream = self.norm, "attn.residual"
        experts = tuple(map(_nest_spec_in_moe_branch, self.moe.module_specs("moe_input")))
        router, *rest = experts
        return (
            norm.make_module_spec("experts.mlp_post", ("mlp_out",), ("mlp_normed",), "mlp_post_1"),
            norm.make_module_spec(
                "experts.router_norm", (stream,), ("router_input",), "router_norm"
            ),
            norm.make_module_spec("experts.norm", (stream,), ("moe_input",), "moe_norm"),
            replace(router, reads=("router_input",)),
            *rest,
            norm.make_module_spec("experts.post", ("moe_out",), ("moe_normed",), "mlp_post_2"),
            ModuleSpec(
                path="experts.sum", reads=("mlp_normed", "moe_normed"), writes=("both_out",),
                reference=("both_out",), arithmetic="residual", op="add",
            ),
        )  # fmt: skip


def _moe_branch_module_path(path: str) -> str:
    """A path of a mixture that is a layer's ``mlp``, in ``MoEBranch``."""
    return path.replace("mlp.", "experts.moe.", 1)


def _nest_spec_in_moe_branch(module: ModuleSpec) -> ModuleSpec:
    """A module of the mixture inside ``MoEBranch``."""
    writes = tuple("moe_out" if value == "mlp_out" else value for value in module.writes)
    module = replace(module, path=_moe_branch_module_path(module.path), writes=writes)
    if isinstance(module, LinearSpec):
        parts = tuple(
            replace(p, split=EXPERT_INNER_AXIS_NAME if p.split else "") for p in module.parts
        )
        columns = EXPERT_INNER_AXIS_NAME if module.split_columns else ""
        return replace(module, parts=parts, split_columns=columns)
    reference = tuple("moe_out" if name == "mlp_out" else name for name in module.reference)
    return replace(module, reference=reference)


class ReplicatedBranchSum(nn.Module):
    """The sum of two branches, both whole on every rank."""

    def forward(self, mlp: torch.Tensor, experts: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H], [T, H] → [T, H]."""
        return mlp + experts


class MoEBranch(nn.Module):
    """norm(MLP's output) + norm(experts of the stream)."""

    def __init__(self, spec: MoEBranchSpec) -> None:
        super().__init__()
        self.mlp_post = spec.norm.build_norm_without_residual(reduces=True)
        self.router_norm = spec.norm.build_norm_without_residual()
        self.norm = spec.norm.build_norm_without_residual()
        self.moe = spec.moe.build_module()
        self.post = spec.norm.build_norm_without_residual(reduces=True)
        self.sum = ReplicatedBranchSum()

    def forward(self, mlp_out: torch.Tensor, stream: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H], the stream behind the attention [T, H] → [T, H]."""
        return self.forward_replacing_moe(mlp_out, stream, step, self.moe)

    def forward_replacing_moe(
        self, mlp_out: torch.Tensor, stream: torch.Tensor, step: Step, moe: nn.Module
    ) -> torch.Tensor:
        """The same with this mixture in the place of its own."""
        mlp = self.mlp_post(mlp_out, step)
        router_input = self.router_norm(stream, step)
        experts = moe(self.norm(stream, step), step, router_input)
        return self.sum(mlp, self.post(experts, step), step)
