"""granite: factors on embeddings, scores, branches and logits (µP, arXiv:2203.03466)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource


class GraniteReference(PlainDecoderReference):
    """GraniteForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self.build_rope()
        self.biased = self.biased_attention_and_mlp_projections()
        self.score_scale = float(config.get("attention_multiplier", 1.0))
        self.embedding_scale = float(config.get("embedding_multiplier", 1.0))
        self.branch_scale = float(config.get("residual_multiplier", 1.0))
        self.logit_scale = 1 / float(config.get("logits_scaling", 1.0))


REFERENCE = GraniteReference
