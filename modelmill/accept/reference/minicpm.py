"""minicpm: factors on embeddings, branches and logits (arXiv:2404.06395)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("minicpm",)
NAME_PREFIX = "model."


class MiniCpmReference(PlainDecoderReference):
    """MiniCPMForCausalLM."""

    TIED_BY_DEFAULT = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        length = int(config.get("max_position_embeddings") or 2048)
        self.rope = partial_rope(config, self.head_dim, length)
        if config.get("attention_bias"):
            self.biased = frozenset(("q", "k", "v", "o_proj"))
        self.embedding_scale = float(config.get("scale_emb", 1.0))
        self.branch_scale = float(config.get("scale_depth", 1.0)) / self.num_layers**0.5
        self.logit_scale = float(config.get("dim_model_base", 1)) / self.hidden_size


REFERENCE = MiniCpmReference
