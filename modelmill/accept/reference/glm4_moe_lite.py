"""glm4_moe_lite: latent attention and experts as in DeepSeek-V3 (the card of GLM-4.7-Flash)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.deepseek import DeepseekReference
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_SIZES = {
    "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_routed_experts": 64,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip


class Glm4MoeLiteReference(DeepseekReference):
    """Glm4MoeLiteForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, DEFAULT_SIZES | config | {"first_k_dense_replace": 1})
        self.mlp_types = config.get("mlp_layer_types")


REFERENCE = Glm4MoeLiteReference
