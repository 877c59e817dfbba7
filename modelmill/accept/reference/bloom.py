"""bloom: ALiBi, a norm behind the embedding, q, k and v head by head (arXiv:2211.05100)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.base import ACTIVATIONS
from modelmill.accept.reference.gpt2_tensor_and_config_names import Gpt2NamesReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

NAME_PREFIX = "transformer."
EMBEDDING_NORM = "transformer.word_embeddings_layernorm"
MEGATRON_PROJECTION_PATHS = {
    "qkv": "self_attention.query_key_value",
    "o_proj": "self_attention.dense",
    "fc": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


class BloomReference(Gpt2NamesReference):
    """BloomForCausalLM."""

    DEFAULTS = ReferenceDefaults(tied=True)
    EMBEDDING = "transformer.word_embeddings.weight"
    OLDER_KEYS = (
        ("hidden_size", "n_embed"),
        ("num_hidden_layers", "n_layer"),
        ("num_attention_heads", "n_head"),
    )

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config | {"num_key_value_heads": None, "head_dim": None})
        if config.get("apply_residual_connection_post_layernorm"):
            raise UnknownArchitecture("residuals behind the norm are not known here")
        self.activation = ACTIVATIONS["gelu_pytorch_tanh"]
        self.alibi_slopes = alibi_slopes(self.num_heads)
        self.projection_paths = MEGATRON_PROJECTION_PATHS
        self.biased = frozenset(self.projection_paths)

    def embed(self, ids: Tensor) -> Tensor:
        """Norm the embeddings."""
        weights = self.read_linear(EMBEDDING_NORM, True)
        return self.apply_norm(super().embed(ids).to(weights.weight), weights, self.eps)


REFERENCE = BloomReference
