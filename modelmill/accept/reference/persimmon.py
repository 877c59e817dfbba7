"""persimmon: q, k and v stored head by head, each normed, half of a head rotated.

Sources: the model's release notes, and the configuration class where they are silent.
"""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.phi import SharedQKLayerNormReference
from modelmill.accept.reference.tensor_source import TensorSource


class PersimmonReference(SharedQKLayerNormReference):
    """PersimmonForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config | {"num_key_value_heads": None})
        self.max_position = int(config.get("max_position_embeddings") or 16384)
        self.activation = self.activation_from_config("hidden_act", "relu2")
        self.rope = self.build_partial_rope(factor=0.5)
        self.projection_paths = {
            "qkv": "self_attn.query_key_value",
            "o_proj": "self_attn.dense",
            "fc": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        }
        self.biased = frozenset(self.projection_paths)
        self.norms_qk = bool(config.get("qk_layernorm", True))


REFERENCE = PersimmonReference
