"""youtu: latent attention (arXiv:2412.19437, 2.1.1) and a gated MLP (the card of Youtu-LLM)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.deepseek import DeepseekReference
from modelmill.accept.reference.tensor_source import TensorSource


class YoutuReference(DeepseekReference):
    """YoutuForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        sizes = {"max_position_embeddings": 131072, "tie_word_embeddings": True}
        no_experts = {"first_k_dense_replace": config["num_hidden_layers"]}
        super().__init__(source, sizes | config | no_experts)


REFERENCE = YoutuReference
