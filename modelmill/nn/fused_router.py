"""The norm in front of a mixture of experts with its router in one op, for few tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from modelmill.nn.fused_module import FusedModule
from modelmill.nn.fused_moe import FusedMoE
from modelmill.nn.moe import MoE
from modelmill.nn.norm import RMSNorm
from modelmill.nn.routed_moe import make_local_fused_topk_inputs
from modelmill.nn.step import Step
from modelmill.ops.add_rms_norm_router import MAX_TOKENS, AddRMSNormRouterInputs, RoutedTokens


class FusedNormRouter(FusedModule):
    """A norm that puts out tokens with their experts, where one op computes both."""

    plain: nn.Module

    def __init__(self, plain: nn.Module, mlp: FusedMoE) -> None:
        super().__init__(plain)
        object.__setattr__(self, "_mlp", mlp)  # it is the layer's child
        self._is_rms_norm = type(plain) is RMSNorm
        experts = cast(MoE, mlp.plain).routing.config.experts
        self._no_logits = torch.empty(0, experts, device="meta")

    def forward(
        self, x: torch.Tensor | None, residual: torch.Tensor | None, step: Step
    ) -> tuple[torch.Tensor | RoutedTokens, torch.Tensor]:
        """x, residual: [T, H]; x None: it was added to the residual before."""
        if x is None:
            x, residual = residual, None
        assert x is not None, "a branch or a residual"
        op = step.ops.add_rms_norm_router
        if (
            op is not None
            and len(x) <= MAX_TOKENS
            and self._is_rms_norm
            and step.tp_group.size == 1
            and cast(FusedMoE, self._mlp).can_take_routed_tokens(x, step.ops)
        ):
            routed: RoutedTokens | None = op(self._op_inputs(x, residual))
            if routed is not None:
                return routed, routed.total
        return self.plain.forward(x, residual, step)

    def _op_inputs(self, x: torch.Tensor, residual: torch.Tensor | None) -> AddRMSNormRouterInputs:
        norm, moe = cast(RMSNorm, self.plain), cast(MoE, cast(FusedMoE, self._mlp).plain)
        router = moe.router
        rules = make_local_fused_topk_inputs(moe, self._no_logits)
        return AddRMSNormRouterInputs(
            x, residual, norm.weight, norm.eps, router.weight, rules._replace(bias=None),
            router.bias, rules.bias, router.scale,
        )  # fmt: skip
