"""exaone: grouped attention and a gated MLP, tensors named as GPT-2's (arXiv:2408.03541)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "transformer."
PUBLISHED_KEYS_BY_CLASS_KEY = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
"""Keys of the configuration class, and what published files call them."""


class ExaoneReference(PlainDecoderReference):
    """ExaoneForCausalLM."""

    EMBEDDING = "transformer.wte.weight"
    FINAL_NORM = "transformer.ln_f"
    LAYERS = "transformer.h"
    DEFAULTS = ReferenceDefaults(kv_heads=8, eps=1e-5, positions=4096, theta=500000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        named = {
            key: config[name] for key, name in PUBLISHED_KEYS_BY_CLASS_KEY.items() if name in config
        }
        super().__init__(source, named | config)
        self.norm_paths = {"input_norm": "ln_1", "mlp_norm": "ln_2"}
        self.projection_paths = {
            **{part: f"attn.attention.{part}_proj" for part in "qkv"},
            "o_proj": "attn.attention.out_proj",
            "gate": "mlp.c_fc_0",
            "up": "mlp.c_fc_1",
            "down": "mlp.c_proj",
        }
        self.biased = self.biased_attention_and_mlp_projections()


REFERENCE = ExaoneReference
