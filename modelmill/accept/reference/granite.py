"""granite: factors on embeddings, scores, branches and logits (µP, arXiv:2203.03466)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("granite",)
NAME_PREFIX = "model."


class GraniteReference(PlainDecoderReference):
    """GraniteForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        length = int(config.get("max_position_embeddings") or 2048)
        self.rope = rope_from_config(config, self.head_dim, length)
        attention = ("q", "k", "v", "o_proj") if config.get("attention_bias") else ()
        mlp = ("gate", "up", "down") if config.get("mlp_bias") else ()
        self.biased = frozenset((*attention, *mlp))
        self.score_scale = float(config.get("attention_multiplier", 1.0))
        self.embedding_scale = float(config.get("embedding_multiplier", 1.0))
        self.branch_scale = float(config.get("residual_multiplier", 1.0))
        self.logit_scale = 1 / float(config.get("logits_scaling", 1.0))


REFERENCE = GraniteReference
