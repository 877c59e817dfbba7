"""ernie4_5_moe: a softmax over experts, chosen with a bias (ERNIE 4.5 technical report)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.moe import QWEN_EXPERT_MATRIX_NAMES, ExpertsMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

SELECTION_BIAS_WEIGHT_KEY = "selection_bias"


class Ernie45MoeReference(ExpertsMixin):
    """Ernie4_5_MoeForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=4, eps=1e-5, positions=131072, tied=True)
    has_interleaved_rope = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        counts = {
            "num_key_value_heads": config.get("num_key_value_heads") or 4,
            "num_experts": config.get("moe_num_experts") or config.get("num_experts"),
            "num_experts_per_tok": config.get("moe_k") or config.get("num_experts_per_tok"),
        }
        super().__init__(source, config | counts)
        self.rope = self.build_rope(theta=500000.0)
        self.biased = self.projections_with_bias("use_bias", self.projection_paths)
        self.shared_count = config.get("moe_num_shared_experts", 2)
        first, last = (config.get(f"moe_layer_{end}_index") for end in ("start", "end"))
        first = 1 if first is None else int(first)
        last = self.num_layers - 1 if last in (None, -1) else int(last)
        every = int(config.get("moe_layer_interval") or 1)
        self.dense_layers = {
            i for i in range(self.num_layers) if not first <= i <= last or (i + 1) % every
        }

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's router with its bias, the experts, and the shared ones."""
        weights = super().mlp_weights(index)
        if index in self.dense_layers:
            return weights
        stem = f"{self.LAYERS}.{index}.mlp"
        bias = self.source.get(f"{stem}.moe_statics.e_score_correction_bias").reshape(-1)
        weights[SELECTION_BIAS_WEIGHT_KEY] = ModuleWeights(bias)
        for name in QWEN_EXPERT_MATRIX_NAMES if self.shared_count else ():
            path = f"{stem}.shared_experts.{name}_proj"
            weights[f"shared_expert.{name}"] = self.read_linear(path, "gate" in self.biased)
        return weights

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run a layer's MLP, or the experts that the router chooses and the shared ones."""
        if "router" not in r.weights:
            return super().mlp(r, normed)
        probabilities = r.linear("router", normed).softmax(-1)
        routing = torch.zeros_like(probabilities)
        for token, ranked in enumerate(probabilities + r.weights[SELECTION_BIAS_WEIGHT_KEY].weight):
            best = ranked.argsort(descending=True)[: self.top_k]
            routing[token, best] = probabilities[token, best] / probabilities[token, best].sum()
        total = self.run_and_combine_experts(r, normed, routing, probabilities, self.run_expert)
        if self.shared_count:
            total = total + self.run_expert(r, "shared_expert", normed)
        return r.record("mlp_out", total, normed)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Add the head's bias."""
        return logits + self.source.get("lm_head.bias") if "gate" in self.biased else logits

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return those of multi-token prediction."""
        return {r"model\.mtp_.*": "the layers of multi-token prediction"}


REFERENCE = Ernie45MoeReference
