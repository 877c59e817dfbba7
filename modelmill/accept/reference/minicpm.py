"""minicpm: factors on embeddings, branches and logits (arXiv:2404.06395)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class MiniCpmReference(PlainDecoderReference):
    """MiniCPMForCausalLM."""

    DEFAULTS = ReferenceDefaults(tied=True)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self.build_partial_rope()
        self.biased = self.projections_with_bias()
        self.embedding_scale = float(config.get("scale_emb", 1.0))
        self.branch_scale = float(config.get("scale_depth", 1.0)) / self.num_layers**0.5
        self.logit_scale = float(config.get("dim_model_base", 1)) / self.hidden_size


REFERENCE = MiniCpmReference
