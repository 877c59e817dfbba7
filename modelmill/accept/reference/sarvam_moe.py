"""sarvam_moe: attention with normed heads, experts as in DeepSeek-V3 (the card of Sarvam 30B)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.glm4_moe import Glm4MoeReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

PUBLISHED_KEYS_BY_CLASS_KEY = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "attention_bias": ("use_qkv_bias",),
}
"""Keys of the configuration class, and what published files call them."""


def with_config_class_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of the configuration class."""
    named = {
        key: config[name]
        for key, names in PUBLISHED_KEYS_BY_CLASS_KEY.items()
        for name in names
        if name in config
    }
    return named | config


class SarvamMoeReference(Glm4MoeReference):
    """SarvamMoEForCausalLM; q, k and v are one matrix."""

    EMBEDDING = "model.word_embeddings.weight"
    SELECTION_BIAS = "mlp.gate.expert_bias"
    DEFAULTS = ReferenceDefaults(kv_heads=4, head_dim=64, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        defaults = {
            "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "use_qk_norm": True,
        }  # fmt: skip
        super().__init__(source, defaults | with_config_class_keys(config))
        self.rope = self.build_partial_rope(factor=1.0, theta=8e6)
        if self.config["use_qk_norm"]:
            self.norm_paths |= {
                "q_norm": "attention.query_layernorm",
                "k_norm": "attention.key_layernorm",
            }

    def attention_projection_weights(self, index: int) -> LayerWeights:
        """Take q, k and v out of their matrix, one behind the other."""
        stem = f"{self.LAYERS}.{index}.attention"
        fused = self.read_linear(f"{stem}.query_key_value", "q" in self.biased)
        rows = [count * self.head_dim for count in (self.num_heads, *[self.num_kv_heads] * 2)]
        weights = fused.weight.split(rows)
        biases = (None,) * 3 if fused.bias is None else fused.bias.split(rows)
        parts = zip("qkv", map(ModuleWeights, weights, biases), strict=True)
        return {**dict(parts), "o_proj": self.read_linear(f"{stem}.dense", False)}


REFERENCE = SarvamMoeReference
