"""A mixture of experts with its tokens grouped by expert; an expert without tokens is not read.

On a GPU the weights of all experts are stacked (``nn.expert_stack``) and computed by fused MoE ops;
the host does not learn which experts have tokens, so that a CUDA graph can contain it all. On a CPU
a fused MoE op computes steps of few tokens where the weights lie in a stack already.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from modelmill.nn.expert_stack import StackedExperts, stack_experts
from modelmill.nn.fused_module import FusedModule
from modelmill.nn.mlp import GatedMLP, SiluMul
from modelmill.nn.moe import MoE
from modelmill.nn.routed_moe import RoutedMoEOperands, make_local_fused_topk_inputs
from modelmill.nn.step import Step
from modelmill.ops.add_rms_norm_router import RoutedTokens
from modelmill.ops.cpu.common.thread_pool import single_thread_torch
from modelmill.ops.registry import Ops

MAX_SINGLE_THREAD_TOKENS = 16
"""Tokens up to which torch's part is small beside the experts' products, which are our kernels'."""


class FusedMoE(nn.Module):
    """The computation of ``MoE`` for all tokens of an expert at once.

    Where no fused MoE op serves the experts' weights, the host waits for the router once to know
    which experts have tokens. While a CUDA graph is captured nothing can be waited for; there every
    expert computes every token, and most results are multiplied by 0.
    """

    def __init__(self, plain: MoE, *, stacks: bool | None = None) -> None:
        """stacks: whether to stack the experts' weights; None: on a GPU, or if nothing moves."""
        super().__init__()
        object.__setattr__(self, "plain", plain)
        for name, child in plain.named_children():
            self.add_module(name, child)
        shared = plain.shared_expert
        self.shared_expert = None if shared is None else FusedSwigluMLP(shared)
        in_place = stacks is None and not plain.router.weight.is_cuda
        self._stacked: StackedExperts | None = None
        if stacks is not False:
            self._stacked = stack_experts(plain, in_place=in_place)
        self._operands: RoutedMoEOperands | None = None
        if self._stacked is not None and plain.has_all_experts:
            self._operands = RoutedMoEOperands(plain, self._stacked)

    def can_take_routed_tokens(self, x: torch.Tensor, ops: Ops) -> bool:
        """Whether a fused MoE op computes x [T, H] from the router's choice as it is."""
        moe, experts = cast(MoE, self.plain), self._stacked
        return (
            experts is not None
            and moe.has_all_experts
            and moe.routing.expert_scale is None
            and experts.is_fused_moe_op_usable(x, ops)
        )

    def forward(
        self,
        x: torch.Tensor | RoutedTokens,
        step: Step,
        router_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] → [T, H]; router_input: what the router reads in the place of x."""
        if isinstance(x, RoutedTokens):
            assert self._stacked is not None, "see can_take_routed_tokens"
            added = next(iter(self._shared_output(x.x, step)), None)
            return self._stacked.run(x.x, x.topk_weights, x.topk_ids, added, step.ops)
        if x.device.type != "cpu" or len(x) > MAX_SINGLE_THREAD_TOKENS:
            return self._run(x, step, router_input)
        op, moe, shared = step.ops.routed_moe, cast(MoE, self.plain), None
        if (
            op is not None
            and self._operands is not None
            and self._operands.can_use_fused_moe_op(x, step.ops)
        ):
            if moe.shared_expert is not None:
                with single_thread_torch():
                    shared = self._shared_output(x, step)
            out: torch.Tensor | None = op(
                x, self._operands.weights(), router_input, shared[0] if shared else None
            )
            if out is not None:
                return out
        with single_thread_torch():
            return self._run(x, step, router_input, shared)

    def _run(
        self,
        x: torch.Tensor,
        step: Step,
        router_input: torch.Tensor | None,
        shared: tuple[torch.Tensor, ...] | None = None,
    ) -> torch.Tensor:
        """shared: the shared expert's output if it is computed already."""
        moe = cast(MoE, self.plain)
        if self._stacked is not None and self._stacked.is_fused_moe_op_usable(x, step.ops):
            weights, ids = route_tokens(moe, x if router_input is None else router_input, step)
            shared = self._shared_output(x, step) if shared is None else shared
            return self._stacked.run(x, weights, ids, next(iter(shared), None), step.ops)
        routing = moe.routing(moe.router(x if router_input is None else router_input, step), step)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            total = compute_all_experts(moe, x, routing, step)
        else:
            total = compute_chosen_experts(moe, x, routing, step)
        for each in self._shared_output(x, step) if shared is None else shared:
            total += each.float()
        return total.to(x.dtype)

    def _shared_output(self, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, ...]:
        return cast(MoE, self.plain).shared_output(x, step, self.shared_expert)


class FusedSwigluMLP(FusedModule):
    """An MLP whose first product has SwiGLU in its epilogue, where there is such an op."""

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H] → [T, H]."""
        return run_expert(self.plain, x, step)


def route_tokens(moe: MoE, x: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, top_k] float32 and ids [T, top_k] int32 of each token's experts.

    Of a rank that has some experts only, ids count from its first; others' are NO_EXPERT.
    """
    router = moe.router
    logits = step.ops.router_gemm(x, router.weight, router.bias, router.scale)
    weights, ids = step.ops.fused_topk(make_local_fused_topk_inputs(moe, logits))
    if moe.routing.expert_scale is not None:
        first, end = moe.local_experts
        scales = moe.routing.expert_scale[first:end].float()
        weights = weights * scales[(ids if moe.has_all_experts else ids.clamp(min=0)).long()]
    return weights, ids


def compute_chosen_experts(
    moe: MoE, x: torch.Tensor, routing: torch.Tensor, step: Step
) -> torch.Tensor:
    """The weighted sum [T, H] float32 of each token's experts on this rank."""
    routing, first = _local_routing_weights(moe, routing), moe.local_experts[0]
    experts, tokens = routing.T.nonzero(as_tuple=True)  # in the order of the experts
    outputs = [
        run_expert(moe.experts[first + index], x if len(x) == 1 else x[rows], step)
        for index, rows in tokens_by_expert(experts, tokens, routing.shape[1])
    ]
    if not outputs:  # other ranks have the experts of all tokens
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    weighted = torch.cat(outputs).float() * routing[tokens, experts, None]
    if len(x) == 1:  # index_add_ starts threads, which takes longer than the sum
        return weighted.sum(0, keepdim=True)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add_(0, tokens, weighted)


def compute_all_experts(
    moe: MoE, x: torch.Tensor, routing: torch.Tensor, step: Step
) -> torch.Tensor:
    """The same where every expert computes every token."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    routing = _local_routing_weights(moe, routing)
    for index, expert in enumerate(moe.local_expert_modules):
        out = run_expert(expert, x, step)
        total += out.float() * routing[:, index, None]
    return total


def _local_routing_weights(moe: MoE, routing: torch.Tensor) -> torch.Tensor:
    """Of the weights [T, E], those of this rank's experts."""
    first, end = moe.local_experts
    return routing[:, first:end]


def tokens_by_expert(
    experts: torch.Tensor, tokens: torch.Tensor, count: int
) -> list[tuple[int, torch.Tensor]]:
    """(expert, its tokens) for each expert that has some.

    Args:
        experts: Of each pair of an expert and a token, the expert; ascending.
        tokens: The token.
        count: How many experts there are.
    """
    counts = torch.bincount(experts, minlength=count).tolist()
    return [(expert, rows) for expert, rows in enumerate(tokens.split(counts)) if counts[expert]]


def run_expert(mlp: nn.Module, x: torch.Tensor, step: Step) -> torch.Tensor:
    """An expert's MLP, in the op that computes the product with SwiGLU where there is one."""
    if not isinstance(mlp, GatedMLP):
        return mlp(x, step)
    if isinstance(mlp.act, SiluMul):
        up = mlp.gate_up_proj
        inner = up.weight.try_linear_swiglu(x, up.bias, step.ops)
        if inner is not None:
            return mlp.down_proj(inner, step)
    return mlp.down_proj(mlp.act(mlp.gate_up_proj(x, step), step), step)
