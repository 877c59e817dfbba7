"""Gathers a mixture's weights for ``ops.routed_moe``, which runs all of it for a few tokens."""

from __future__ import annotations

from operator import is_

import torch

from modelmill.nn.expert_stack import StackedExperts
from modelmill.nn.moe import MoE
from modelmill.ops.fused_topk import FusedTopkInputs
from modelmill.ops.registry import Ops
from modelmill.ops.routed_moe import RoutedMoEWeights


class RoutedMoEOperands:
    """The weights and rules of a mixture, gathered again where the router got other ones."""

    def __init__(self, moe: MoE, experts: StackedExperts) -> None:
        self._moe, self._experts = moe, experts
        self._router, self._routing = moe.router, moe.routing
        self._read: tuple[object, ...] = ()
        self._weights: RoutedMoEWeights | None = None

    def can_use_fused_moe_op(self, x: torch.Tensor, ops: Ops) -> bool:
        """Whether the experts may be computed by a fused MoE op."""
        return self._experts.is_fused_moe_op_usable(x, ops)

    def weights(self) -> RoutedMoEWeights:
        """The op's operand."""
        router, routing = self._router, self._routing
        # a look into the buffers: each layer of each step asks, and an attribute takes 1 us
        matrix, vectors = router._buffers, routing._buffers
        read = (
            matrix["weight"], matrix["bias"], router.scale, routing.config,
            vectors["selection_bias"], vectors["expert_scale"],
        )  # fmt: skip
        if self._weights is None or not all(map(is_, read, self._read)):
            self._read = read
            no_logits = router.weight.new_empty(0, len(router.weight), dtype=torch.float32)
            self._weights = RoutedMoEWeights(
                self._experts.op, self._experts.make_empty_op_inputs(router.weight), router.weight,
                make_local_fused_topk_inputs(self._moe, no_logits), router.bias, router.scale,
                routing.expert_scale,
            )  # fmt: skip
        return self._weights


def make_local_fused_topk_inputs(moe: MoE, logits: torch.Tensor) -> FusedTopkInputs:
    """The router's rules for these logits, with ids as this rank counts its experts."""
    return moe.routing.topk_inputs(logits, None if moe.has_all_experts else moe.local_experts)
