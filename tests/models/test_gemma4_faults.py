"""Faults of Gemma 4 that no config makes: acceptance refuses the build and names the module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modelmill.models import gemma4_text
from modelmill.nn.moe import TopKRouting
from modelmill.nn.moe_branch import MoEBranch, ReplicatedBranchSum
from modelmill.nn.per_layer_input import (
    SUM_SCALE,
    FixedScaleSum,
    PerLayerInputActAndMul,
    PerLayerInputs,
    ScaledEmbedding,
    ScaledProjection,
)
from modelmill.nn.scaled_sandwich import LearnedScaleSum
from modelmill.nn.shared_kv_attention import QNormAndRope
from modelmill.nn.value_norm import ValueNorm
from tests.models.families.gemma4_text import TYPES
from tests.models.planted_fault import (
    PlantedFault,
    module_fault,
    refusal_test,
    rule_fault,
    tensor_fault,
)

FAMILY = "gemma4_text"
LAYERS = 4
CHANGES = {"num_hidden_layers": LAYERS, "layer_types": TYPES[:LAYERS], "num_experts": 3}
Tensor = torch.Tensor


def without_norm(self: ValueNorm, qkv: Tensor, step: Any) -> Tensor:
    del step
    width = self.kv_heads * self.head_dim
    return torch.cat((qkv, qkv[:, -width:]), -1) if self.config.from_keys else qkv


def with_larger_eps(self: ValueNorm, qkv: Tensor, step: Any) -> Tensor:
    config, self.config = self.config, replace(self.config, eps=10 * self.config.eps)
    out = real_value_norm(self, qkv, step)
    self.config = config
    return out


def values_over_heads(self: ValueNorm, qkv: Tensor, step: Any) -> Tensor:
    """One norm over all heads of v in the place of one of each."""
    out = real_value_norm(self, qkv, step)
    if self.kv_heads == 1:
        return out
    v = qkv[:, -self.kv_heads * self.head_dim :].float()
    v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.config.eps)
    return torch.cat((out[:, : -v.shape[1]], v.to(out.dtype)), -1)


def queries_as_values(self: ValueNorm, qkv: Tensor, step: Any) -> Tensor:
    """Values from the first head's queries where they are those of the keys."""
    out = real_value_norm(self, qkv, step)
    if not self.config.from_keys:
        return out
    width = self.kv_heads * self.head_dim
    return torch.cat((out[:, :-width], qkv[:, :width]), -1)


def next_layers_input(self: PerLayerInputActAndMul, gate: Tensor, step: Any) -> Tensor:
    return self.compute(gate) * step.layer_inputs[:, (self.layer + 1) % LAYERS]


def without_activation(self: PerLayerInputActAndMul, gate: Tensor, step: Any) -> Tensor:
    return gate * step.layer_inputs[:, self.layer]


def without_table(self: FixedScaleSum, one: Tensor, other: Tensor, step: Any) -> Tensor:
    del self, other, step
    return one * SUM_SCALE


def larger_sum(self: FixedScaleSum, one: Tensor, other: Tensor, step: Any) -> Tensor:
    return 1.05 * real_sum(self, one, other, step)


def unscaled_table(self: ScaledEmbedding, ids: Tensor, step: Any) -> Tensor:
    return real_table(self, ids, step) / self.scale


def unscaled_projection(self: ScaledProjection, x: Tensor, step: Any) -> Tensor:
    return real_projection(self, x, step) / self.scale


def layers_in_the_other_order(self: PerLayerInputs, x: Tensor, step: Any) -> Tensor:
    return real_inputs(self, x, step).flip(1)


def without_scale(self: LearnedScaleSum, branch: Tensor, residual: Tensor, step: Any) -> Tensor:
    del self, step
    return branch + residual


def scaled_branch(self: LearnedScaleSum, branch: Tensor, residual: Tensor, step: Any) -> Tensor:
    del step
    return branch * self.scale + residual


def without_turn(self: QNormAndRope, q: Tensor, rope: Any, step: Any) -> Tensor:
    rope = rope.local if self.local_rope else rope
    still = replace(rope, cos=torch.ones_like(rope.cos), sin=torch.zeros_like(rope.sin), local=None)
    return real_query_rope(self, q, still, step)


def rotation_of_windows(self: QNormAndRope, q: Tensor, rope: Any, step: Any) -> Tensor:
    """Layers with full attention turned as those with a window, and the other way round."""
    cos, sin = rope.local.cos, rope.local.sin
    if not self.local_rope:
        pad = rope.cos.shape[1] - cos.shape[1]
        cos = torch.nn.functional.pad(cos, (0, pad), value=1.0)
        sin = torch.nn.functional.pad(sin, (0, pad))
        return real_query_rope(self, q, replace(rope, cos=cos, sin=sin, local=None), step)
    return real_query_rope(self, q, rope, step)


def without_expert_scale(self: TopKRouting, logits: Tensor, step: Any) -> Tensor:
    scale, self.expert_scale = self.expert_scale, None
    out = real_routing(self, logits, step)
    self.expert_scale = scale
    return out


def without_experts(self: ReplicatedBranchSum, mlp: Tensor, experts: Tensor, step: Any) -> Tensor:
    del self, experts, step
    return mlp


def router_reads_the_experts_input(
    self: MoEBranch, mlp_out: Tensor, stream: Tensor, step: Any
) -> Tensor:
    mlp, normed = self.mlp_post(mlp_out, step), self.norm(stream, step)
    return self.sum(mlp, self.post(self.moe(normed, step), step), step)


def swapped_norms(rule: Any) -> Any:
    """The norms of the two branches in each other's places."""
    sources = tuple(
        name.replace("norm_1", "norm_X").replace("norm_2", "norm_1").replace("norm_X", "norm_2")
        if "post_feedforward" in name
        else name
        for name in rule.sources
    )
    return replace(rule, sources=sources)


one = torch.tensor([7])
real_value_norm, real_inputs = ValueNorm.forward, PerLayerInputs.forward
real_table, real_projection = ScaledEmbedding.forward, ScaledProjection.forward
real_sum = FixedScaleSum.forward
real_query_rope, real_routing = QNormAndRope.forward, TopKRouting.forward
FAULTS: dict[str, PlantedFault] = {
    "values not normed": module_fault(
        ValueNorm, without_norm, ("attn.value_norm", "attn.value_norm.eps")
    ),
    "eps of values x 10": module_fault(ValueNorm, with_larger_eps, "attn.value_norm.eps"),
    "values normed over all heads": module_fault(ValueNorm, values_over_heads, "attn.value_norm"),
    "queries for the values that are keys": module_fault(
        ValueNorm, queries_as_values, "attn.value_norm", 1
    ),
    "the next layer's input": module_fault(
        PerLayerInputActAndMul, next_layers_input, "layer_input.act"
    ),
    "no activation of the gate": module_fault(
        PerLayerInputActAndMul, without_activation, "layer_input.act"
    ),
    "layer inputs without the table": module_fault(
        FixedScaleSum, without_table, "layer_inputs.sum", None
    ),
    "layer inputs x 1.05": module_fault(FixedScaleSum, larger_sum, "layer_inputs.sum", None),
    "their table without its factor": module_fault(
        ScaledEmbedding, unscaled_table, "layer_inputs.table", None
    ),
    "their projection without its factor": module_fault(
        ScaledProjection, unscaled_projection, "layer_inputs.projection", None
    ),
    "layer inputs in the other order": module_fault(
        PerLayerInputs, layers_in_the_other_order, "layer_input.act"
    ),
    "one row of their table": tensor_fault(
        "layer_inputs.table.weight", lambda t: t.index_fill(0, one, 0.0), "layer_inputs.table", None
    ),
    "rows of their projection in another order": tensor_fault(
        "layer_inputs.projection.weight", lambda t: t.roll(1, 0), "layer_inputs.projection", None
    ),
    "no number behind a layer": module_fault(LearnedScaleSum, without_scale, "output"),
    "the number times the branch alone": module_fault(LearnedScaleSum, scaled_branch, "output"),
    "the number of one layer x 1.05": tensor_fault(
        "layers.2.output.scale", lambda t: t * 1.05, "output", 2
    ),
    "queries of shared layers not turned": module_fault(QNormAndRope, without_turn, "attn.rope", 2),
    "the other rotation of shared layers": module_fault(
        QNormAndRope, rotation_of_windows, "attn.rope", 3
    ),
    "another weight of the queries' norm": tensor_fault(
        "layers.2.attn.rope.q_norm.weight", lambda t: t * 1.05, ("attn.rope", "attn.rope.eps"), 2
    ),
    "weights of the experts not scaled": module_fault(
        TopKRouting, without_expert_scale, "experts.moe.routing"
    ),
    "a router that reads the experts' input": module_fault(
        MoEBranch, router_reads_the_experts_input, "experts.moe.router.input"
    ),
    "experts forgotten": module_fault(ReplicatedBranchSum, without_experts, "experts.sum"),
    "norms of the two branches exchanged": rule_fault(
        gemma4_text, swapped_norms, ("experts.mlp_post", "experts.mlp_post.eps")
    ),
    "the router's scale forgotten": tensor_fault(
        "layers.1.experts.router_norm.weight", torch.ones_like,
        ("experts.router_norm", "experts.router_norm.eps"), 1
    ),
    "projection of a layer's input x 1.05": tensor_fault(
        "layers.3.layer_input.up_proj.weight", lambda t: t * 1.05,
        ("layer_input.input_up_proj", "layer_input.up_proj"), 3
    ),
}  # fmt: skip
test_a_planted_fault_is_refused_by_name = refusal_test(FAULTS)
