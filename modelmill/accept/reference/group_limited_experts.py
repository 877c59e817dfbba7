"""The experts of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2), which GLM-4.5 has as well.

Each expert's score is a sigmoid. With a learned bias added they are ranked within groups, of which
a token has those with the largest sum of their two best; its weights are the scores without the
bias. Every token has the shared experts, which are one MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource


class GroupLimitedExpertsMixin(PlainDecoderReference):
    """A decoder whose layers behind the first few have experts.

    Attributes:
        ROUTER: the name of the router's matrix.
        SELECTION_BIAS: what is added to the scores for the choice.
    """

    ROUTER = "mlp.gate"
    SELECTION_BIAS = "mlp.gate.e_score_correction_bias"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_experts = self.config_int_or_default("n_routed_experts", 256)
        self.top_k = self.config_int_or_default("num_experts_per_tok", 8)
        self.groups = self.config_int_or_default("n_group", 1)
        self.top_groups = self.config_int_or_default("topk_group", 1)
        self.routed_scale = float(config.get("routed_scaling_factor") or 1.0)
        self.renormalizes = bool(config.get("norm_topk_prob", True))
        dense = config.get("first_k_dense_replace")
        self.first_experts = 1 if dense is None else int(dense)
        self.mlp_types: list[str] | None = None

    def config_int_or_default(self, key: str, default: int) -> int:
        """Return a number of the config."""
        return int(self.config.get(key) or default)

    def attention_projection_weights(self, index: int) -> LayerWeights:
        """Read the projections of attention."""
        return {
            name: self.read_linear(
                f"{self.LAYERS}.{index}.{self.projection_paths[name]}", name in self.biased
            )
            for name in ("q", "k", "v", "o_proj")
        }

    def is_dense_layer(self, index: int) -> bool:
        """Return whether a layer has an MLP: ``mlp_types`` says it, else the first few have."""
        if self.mlp_types is None:
            return index < self.first_experts
        return self.mlp_types[index] == "dense"

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's attention, and its MLP or router and experts."""
        weights = self.attention_projection_weights(index)
        stem = f"{self.LAYERS}.{index}.mlp"
        if self.is_dense_layer(index):
            return weights | self._read_mlp_weights(stem, "")
        weights["router"] = self.read_linear(f"{self.LAYERS}.{index}.{self.ROUTER}", False)
        for expert in range(self.num_experts):
            weights |= self._read_mlp_weights(f"{stem}.experts.{expert}", f"experts.{expert}.")
        return weights | self._read_mlp_weights(f"{stem}.shared_experts", "shared_expert.")

    def _read_mlp_weights(self, stem: str, prefix: str) -> LayerWeights:
        return {
            f"{prefix}{name}": self.read_linear(f"{stem}.{name}_proj", False)
            for name in ("gate", "up", "down")
        }

    def run_mlp_or_experts(self, index: int, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's MLP, or its experts."""
        if self.is_dense_layer(index):
            return self.mlp(r, normed)
        scores = self.expert_scores(r.linear("router", normed))
        bias = self.expert_selection_bias(index)
        routing = torch.stack([self._routing_weights_for_one_token(row, bias) for row in scores])
        total = self.run_and_combine_experts(r, normed, routing, scores, self._run_gated_mlp)
        return r.record("mlp_out", total + self._run_gated_mlp(r, "shared_expert", normed), normed)

    def expert_scores(self, logits: Tensor) -> Tensor:
        """Return the experts' scores."""
        return logits.sigmoid()

    def expert_group_score(self, scores: list[float]) -> float:
        """Return what a group is chosen by: the sum of its two best scores."""
        return sum(sorted(scores, reverse=True)[:2])

    def expert_selection_bias(self, index: int) -> Tensor:
        """Return what is added to a layer's scores for the choice, [E]."""
        return self.source.get(f"{self.LAYERS}.{index}.{self.SELECTION_BIAS}")

    def _routing_weights_for_one_token(self, scores: Tensor, bias: Tensor) -> Tensor:
        """[E]: the weights of one token's experts, 0 for the others."""
        ranked = (scores + bias).tolist()
        size = self.num_experts // self.groups
        parts = [range(g * size, (g + 1) * size) for g in range(self.groups)]
        strength = [self.expert_group_score([ranked[e] for e in part]) for part in parts]
        best = sorted(range(self.groups), key=lambda g: -strength[g])[: self.top_groups]
        allowed = [e for g in best for e in parts[g]]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[: self.top_k]
        weights = torch.zeros_like(scores)
        weights[chosen] = scores[chosen] * self.routed_scale
        return weights / scores[chosen].sum() if self.renormalizes else weights

    def _run_gated_mlp(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        if name != "shared_expert":
            r.record(f"{name}.input", x)
        gate, up = r.linear(f"{name}.gate", x), r.linear(f"{name}.up", x)
        return r.linear(f"{name}.down", r.record(f"{name}.act", self.activation(gate) * up, gate))
