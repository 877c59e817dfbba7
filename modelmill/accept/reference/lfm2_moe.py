"""lfm2_moe: lfm2's layers with experts behind the first few (arXiv:2511.23404, section 2.2).

An expert's score is a sigmoid; a token has those with the largest scores plus a learned bias, and
their weights are the scores without it, divided by their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.lfm2 import MLP_MATRIX_PATHS, Lfm2Reference
from modelmill.accept.reference.tensor_source import TensorSource

SELECTION_BIAS_WEIGHT_KEY = "selection_bias"
ROUTING_WEIGHT_SUM_EPS = 1e-6  # as transformers has it


class Lfm2MoeReference(Lfm2Reference):
    """Lfm2MoeForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_experts = int(config.get("num_experts") or 32)
        self.top_k = int(config.get("num_experts_per_tok") or 4)
        dense = config.get("num_dense_layers")
        self.num_dense = 2 if dense is None else int(dense)
        self.is_biased = bool(config.get("use_expert_bias", True))
        self.renormalizes = bool(config.get("norm_topk_prob", True))
        self.routed_scale = float(config.get("routed_scaling_factor") or 1.0)

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's MLP, or its router and experts."""
        if index < self.num_dense:
            return super().mlp_weights(index)
        stem = f"{self.LAYERS}.{index}.feed_forward"
        weights = {"router": self.read_linear(f"{stem}.gate", False)}
        if self.is_biased:
            weights[SELECTION_BIAS_WEIGHT_KEY] = ModuleWeights(
                self.source.get(f"{stem}.expert_bias")
            )
        for number in range(self.num_experts):
            for name, matrix in MLP_MATRIX_PATHS.items():
                path = f"{stem}.experts.{number}.{matrix}"
                weights[f"experts.{number}.{name}"] = self.read_linear(path, False)
        return weights

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's MLP, or the experts that the router chooses."""
        if "router" not in r.weights:
            return super().mlp(r, normed)
        scores = torch.sigmoid(r.linear("router", normed))
        ranked = scores + r.weights[SELECTION_BIAS_WEIGHT_KEY].weight if self.is_biased else scores
        routing = torch.zeros_like(scores)
        for token in range(len(scores)):
            best = ranked[token].argsort(descending=True)[: self.top_k]
            share = scores[token, best].sum() + ROUTING_WEIGHT_SUM_EPS if self.renormalizes else 1.0
            routing[token, best] = scores[token, best] * self.routed_scale / share
        total = self.run_and_combine_experts(r, normed, routing, scores, self.run_expert)
        return r.record("mlp_out", total, normed)

    def run_expert(self, r: LayerRecorder, name: str, x: Tensor) -> Tensor:
        """Run one expert on its tokens."""
        r.record(f"{name}.input", x)
        gate, up = r.linear(f"{name}.gate", x), r.linear(f"{name}.up", x)
        return r.linear(f"{name}.down", r.record(f"{name}.act", self.activation(gate) * up, gate))


REFERENCE = Lfm2MoeReference
