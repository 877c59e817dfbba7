"""bloom: ALiBi, a norm behind the embedding, q, k and v head by head (arXiv:2211.05100)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.base import ACTIVATIONS, Affine, LayerWeights, layer_norm
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource
from modelmill.core.errors import UnknownArchitecture

MODEL_TYPES = ("bloom",)
NAME_PREFIX = "transformer."


class BloomReference(PlainDecoderReference):
    """BloomForCausalLM."""

    EMBEDDING = "transformer.word_embeddings.weight"
    FINAL_NORM = "transformer.ln_f"
    LAYERS = "transformer.h"
    TIED_BY_DEFAULT = True
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        names = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer"}
        names["num_attention_heads"] = "n_head"
        own = {name: config[old] for name, old in names.items() if config.get(old) is not None}
        super().__init__(source, config | own | {"num_key_value_heads": None, "head_dim": None})
        if config.get("apply_residual_connection_post_layernorm"):
            raise UnknownArchitecture("residuals behind the norm are not known here")
        self.eps = float(config.get("layer_norm_epsilon", 1e-5))
        self.activation = ACTIVATIONS["gelu_pytorch_tanh"]
        self.alibi_slopes = alibi_slopes(self.num_heads)

    def embed(self, ids: Tensor) -> Tensor:
        """Norm the embeddings."""
        stem = "transformer.word_embeddings_layernorm"
        weights = Affine(self.source.get(f"{stem}.weight"), self.source.get(f"{stem}.bias"))
        x = super().embed(ids).to(weights.weight)
        return layer_norm(x, weights, self.eps)

    def projections(self, index: int) -> LayerWeights:
        """Take q, k and v out of the rows of each head."""
        stem = f"{self.LAYERS}.{index}"
        fused = self.read_affine(f"{stem}.self_attention.query_key_value", True)
        assert fused.bias is not None
        rows = fused.weight.reshape(self.num_heads, 3, self.head_dim, -1)
        biases = fused.bias.reshape(self.num_heads, 3, -1)
        out: LayerWeights = {
            name: Affine(rows[:, part].reshape(self.hidden_size, -1), biases[:, part].reshape(-1))
            for part, name in enumerate(("q", "k", "v"))
        }
        return out | {
            "o_proj": self.read_affine(f"{stem}.self_attention.dense", True),
            "fc": self.read_affine(f"{stem}.mlp.dense_h_to_4h", True),
            "down": self.read_affine(f"{stem}.mlp.dense_4h_to_h", True),
        }


REFERENCE = BloomReference
