"""hy_v3: normed heads, experts with sigmoid scores (the model card of Hy3).

Experts are ranked by score plus a learned bias; their weights are the scores, divided by their sum,
times a factor. Every token has the shared experts, which are one MLP.
"""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights
from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import MLP_LINEAR_NAMES, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class HYV3Reference(PerHeadQKNormMixin, GroupLimitedExpertsMixin):
    """HYV3ForCausalLM."""

    ROUTER, SELECTION_BIAS = "mlp.router.gate", "mlp.expert_bias"
    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, eps=1e-5, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        count = config.get("num_experts") or config.get("num_local_experts") or 192
        routing = {
            "n_routed_experts": count,
            "routed_scaling_factor": config.get("router_scaling_factor") or 2.826,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        }  # fmt: skip
        super().__init__(source, config | routing)
        self.rope = self.build_rope(theta=11158840.0)
        self.mlp_biased = self.projections_with_bias("mlp_bias", MLP_LINEAR_NAMES)
        self.biased = self.projections_with_bias() | self.mlp_biased
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        self.first_experts, self.mlp_types = 1, config.get("mlp_layer_types")

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's attention, and its MLP or router and experts."""
        weights, stem = self.attention_projection_weights(index), f"{self.LAYERS}.{index}.mlp"
        if self.is_dense_layer(index):
            return weights | self._read_gated_mlp_weights(stem, "", bool(self.mlp_biased))
        weights["router"] = self.read_linear(f"{self.LAYERS}.{index}.{self.ROUTER}", False)
        for number in range(self.num_experts):
            name = f"experts.{number}"
            weights |= self._read_gated_mlp_weights(f"{stem}.{name}", f"{name}.", False)
        shared = f"{stem}.shared_mlp"
        return weights | self._read_gated_mlp_weights(
            shared, "shared_expert.", bool(self.mlp_biased)
        )

    def _read_gated_mlp_weights(self, stem: str, prefix: str, biased: bool) -> LayerWeights:
        return {
            f"{prefix}{name}": self.read_linear(f"{stem}.{name}_proj", biased)
            for name in MLP_LINEAR_NAMES
        }

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return those of multi-token prediction."""
        layer = rf"model\.layers\.{self.num_layers}\..*"
        return {layer: "the layer of multi-token prediction"}


REFERENCE = HYV3Reference
