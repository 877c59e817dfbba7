"""afmoe: gated attention, norms around branches, experts (the model cards of Trinity)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights
from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_EXPERTS, DEFAULT_TOP_K = 64, 6


class AfmoeReference(PerHeadQKNormMixin, GroupLimitedExpertsMixin):
    """AfmoeForCausalLM."""

    ROUTER, SELECTION_BIAS = "mlp.router.gate", "mlp.expert_bias"
    DEFAULTS = ReferenceDefaults(head_dim=128, eps=1e-5, positions=16384, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        dense = config.get("num_dense_layers")
        routing = {
            "n_routed_experts": config.get("num_experts") or DEFAULT_EXPERTS,
            "num_experts_per_tok": config.get("num_experts_per_tok") or DEFAULT_TOP_K,
            "routed_scaling_factor": config.get("route_scale") or 1.0,
            "first_k_dense_replace": 1 if dense is None else dense,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        }  # fmt: skip
        super().__init__(source, config | routing)
        self.norm_paths = {
            "input_norm": "input_layernorm",
            "attn_post": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_post": "post_mlp_layernorm",
            **PER_HEAD_QK_NORM_PATHS,
        }
        every = int(config.get("global_attn_every_n_layers") or 4)
        self.windows = self.sliding_windows_by_layer(int(config.get("sliding_window", 1024)), every)
        self.unrotated = frozenset(i for i, each in enumerate(self.windows) if each is None)
        if config.get("mup_enabled"):
            self.embedding_scale = self.hidden_size**0.5
        self.biased = self.projections_with_bias()
        self.layer = self.sandwich_layer

    def attention_projection_weights(self, index: int) -> LayerWeights:
        """Read the projections of attention, with that of its gates."""
        gate = self.read_linear(f"{self.LAYERS}.{index}.self_attn.gate_proj", False)
        return super().attention_projection_weights(index) | {"attn_gate": gate}


REFERENCE = AfmoeReference
