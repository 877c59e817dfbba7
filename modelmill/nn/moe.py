"""Mixture of experts: a router chooses a few gated MLPs for each token (arXiv:1701.06538).

The modules are those of the definition, one expert after another. ``nn.fused_moe`` groups the
tokens by expert first, and runs those only that have some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from modelmill.nn.mlp import GatedMLP, MLPSpec, PlainMLP
from modelmill.nn.step import Step
from modelmill.ops.fused_topk import SIGMOID as SIGMOID
from modelmill.ops.fused_topk import SOFTMAX as SOFTMAX
from modelmill.ops.fused_topk import SPARSE_MIXER as SPARSE_MIXER
from modelmill.ops.fused_topk import FusedTopkInputs, fused_topk
from modelmill.parallel.shard import Range


@dataclass(frozen=True)
class RouterConfig:
    """How the experts of a token are chosen and weighted.

    Attributes:
        experts: How many there are.
        top_k: How many each token has.
        scores: SOFTMAX over all experts, SIGMOID of each by itself, or SPARSE_MIXER, which chooses
            one expert after the other.
        renormalize: Whether the weights of a token's experts are divided by their sum. A softmax
            over the chosen logits alone is the same.
        selection_bias: Whether a learned bias is added to the scores for the choice, and not for
            the weights (arXiv:2408.15664).
        bias: Whether the logits have a learned bias.
        scale: Factor of the weights.
        groups: The experts are divided into so many groups, of which a token has ``top_groups``,
            those with the largest sum of their ``group_scores`` largest scores: two in DeepSeek-V3
            (arXiv:2412.19437, section 2.1.2), one in DeepSeek-V2; 1: no groups.
        top_groups: See ``groups``.
        logit_scale: Factor of the logits.
        expert_scale: Whether each expert has a learned factor of its weights (Gemma 4).
        jitter: SparseMixer's relative noise of the logits.
        sum_eps: Added to the sum by which ``renormalize`` divides (LFM2-MoE).
    """

    experts: int
    top_k: int
    scores: str = SOFTMAX
    renormalize: bool = True
    selection_bias: bool = False
    bias: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_scores: int = 2
    logit_scale: float = 1.0
    expert_scale: bool = False
    jitter: float = 0.0
    sum_eps: float = 0.0


class Router(nn.Module):
    """x Wᵀ + b in float32: [T, H] → [T, E]. The matrix is small and is never quantized."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, hidden: int, experts: int, bias: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("weight", torch.empty(experts, hidden, device="meta"))
        self.register_buffer("bias", torch.empty(experts, device="meta") if bias else None)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """The logits of the experts, float32."""
        logits = x.float() @ self.weight.float().T
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.bias is None else logits + self.bias.float()


class TopKRouting(nn.Module):
    """Logits [T, E] → weights [T, E] float32, 0 for the experts that a token does not have."""

    selection_bias: torch.Tensor | None
    expert_scale: torch.Tensor | None

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        scale = torch.empty(config.experts, device="meta") if config.expert_scale else None
        self.register_buffer("expert_scale", scale)
        bias = torch.empty(config.experts, device="meta") if config.selection_bias else None
        self.register_buffer("selection_bias", bias)

    def forward(self, logits: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """The weight of each expert for each token."""
        weights, ids = fused_topk(self.topk_inputs(logits))
        chosen = ids.long()
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.float()[chosen]
        return torch.zeros_like(logits).scatter_(1, chosen, weights)

    def topk_inputs(
        self, logits: torch.Tensor, local_experts: Range | None = None
    ) -> FusedTopkInputs:
        """The rules for these logits [T, E]; local_experts: as in ``FusedTopkInputs``."""
        config = self.config
        return FusedTopkInputs(
            logits, self.selection_bias, config.top_k, config.scores, config.renormalize,
            config.scale, config.groups, config.top_groups, config.group_scores, local_experts,
            config.jitter, config.sum_eps,
        )  # fmt: skip


class GatherExpertTokens(nn.Module):
    """The rows of x whose tokens have this expert, in order."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x: torch.Tensor, routing: torch.Tensor, step: Step) -> torch.Tensor:  # noqa: ARG002
        """[T, H], [T, E] → [tokens of the expert, H]."""
        return x[routing[:, self.expert] != 0]


class Expert(GatedMLP):
    """A gated MLP for the tokens that have it."""

    def __init__(self, spec: MLPSpec, index: int) -> None:
        super().__init__(spec.hidden, spec.inner, spec.bias, spec.activation, spec.clamp)
        self.tokens = GatherExpertTokens(index)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[its tokens, H] → the same shape; without tokens nothing is computed."""
        return super().forward(x, step) if len(x) else x


class PlainExpert(PlainMLP):
    """An MLP of two matrices for the tokens that have it (Nemotron 3)."""

    def __init__(self, spec: MLPSpec, index: int) -> None:
        super().__init__(spec.hidden, spec.inner, spec.bias, spec.activation)
        self.tokens = GatherExpertTokens(index)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[its tokens, H] → the same shape; without tokens nothing is computed."""
        return super().forward(x, step) if len(x) else x


ExpertMLP = Expert | PlainExpert


def make_expert(spec: MLPSpec, index: int) -> ExpertMLP:
    """The expert of this number."""
    return Expert(spec, index) if spec.gated else PlainExpert(spec, index)


class RemoteExpertPlaceholder(nn.Module):
    """In the place of an expert whose weights another rank has."""


class SharedExpertGate(nn.Module):
    """sigmoid(x · w) for each token, times the shared expert's output (Qwen2-MoE)."""

    weight: torch.Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(1, hidden, device="meta"))

    def forward(self, x: torch.Tensor, out: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, H], [T, H] → [T, H]."""
        return step.ops.shared_expert_gate(x, self.weight, out)


class CombineExperts(nn.Module):
    """The sum of a token's experts by their weights, and of a shared expert's output."""

    def __init__(self, experts: Range) -> None:
        """experts: this rank's."""
        super().__init__()
        self.experts = experts

    def forward(self, routing: torch.Tensor, *outputs_and_step: torch.Tensor) -> torch.Tensor:
        """Weights [T, E], the output of each expert, that of the shared one if any → [T, H]."""
        first, end = self.experts
        outputs = outputs_and_step[: end - first]
        shared = outputs_and_step[end - first : -1]
        total = torch.zeros(
            len(routing), outputs[0].shape[1], dtype=torch.float32, device=routing.device
        )
        for expert, out in enumerate(outputs, first):
            rows = (routing[:, expert] != 0).nonzero()[:, 0]
            total.index_add_(0, rows, out.float() * routing[rows, expert, None])
        if shared:
            total += shared[0].float()
        return total.to(outputs[0].dtype)


class MoE(nn.Module):
    """combine(experts chosen by the router, the shared expert).

    Attributes:
        local_experts: The range of experts that this rank has, all or in expert parallelism some.
            The router, which every rank has, chooses of all; the ranks' outputs are partial sums.
    """

    def __init__(
        self, router: RouterConfig, expert: MLPSpec, shared: MLPSpec | None, *, shared_gate: bool
    ) -> None:
        super().__init__()
        self.router = Router(expert.hidden, router.experts, router.bias, router.logit_scale)
        self.routing = TopKRouting(router)
        self.experts = nn.ModuleList(make_expert(expert, index) for index in range(router.experts))
        self.shared_expert = None if shared is None else shared.build_module()
        self.shared_gate = SharedExpertGate(expert.hidden) if shared_gate else None
        self.local_experts: Range = (0, router.experts)
        self.combine = CombineExperts(self.local_experts)

    def keep_local_experts(self, experts: Range) -> None:
        """Keep these experts, under their numbers; called before any weight is put in place."""
        first, end = self.local_experts = experts
        self.experts = nn.ModuleList(
            expert if first <= index < end else RemoteExpertPlaceholder()
            for index, expert in enumerate(self.experts)
        )
        self.combine = CombineExperts(experts)

    @property
    def has_all_experts(self) -> bool:
        """Whether this rank has every expert."""
        return self.local_experts == (0, self.routing.config.experts)

    @property
    def local_expert_modules(self) -> list[ExpertMLP]:
        """The experts of this rank, in order."""
        first, end = self.local_experts
        return cast(list[ExpertMLP], list(self.experts)[first:end])

    def forward(
        self, x: torch.Tensor, step: Step, router_input: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, H] → [T, H]; router_input: what the router reads in the place of x."""
        routing = self.routing(self.router(x if router_input is None else router_input, step), step)
        outputs = [
            expert(expert.tokens(x, routing, step), step) for expert in self.local_expert_modules
        ]
        return self.combine(routing, *outputs, *self.shared_output(x, step), step)

    def shared_output(
        self, x: torch.Tensor, step: Step, fused: nn.Module | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The shared expert's output [T, H]; () without one. fused: what computes it instead."""
        expert = self.shared_expert if fused is None else fused
        if expert is None:
            return ()
        out = expert(x, step)
        return (out if self.shared_gate is None else self.shared_gate(x, out, step),)
