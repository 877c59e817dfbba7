"""chatglm: half of each head rotated by neighbouring channels (arXiv:2406.12793)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource

NAME_PREFIX = "transformer."


class ChatGlmReference(PlainDecoderReference):
    """ChatGLMForConditionalGeneration of ChatGLM2, ChatGLM3 and GLM-4."""

    has_interleaved_rope = True
    EMBEDDING = "transformer.embedding.word_embeddings.weight"
    FINAL_NORM = "transformer.encoder.final_layernorm"
    LAYERS = "transformer.encoder.layers"
    HEAD = "transformer.output_layer.weight"
    EPS_KEY = "layernorm_epsilon"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config | {"num_hidden_layers": config["num_layers"]})
        self.head_dim = int(config.get("kv_channels") or self.head_dim)
        self.score_scale = self.head_dim**-0.5
        self.num_kv_heads = self.num_heads
        if config.get("multi_query_attention"):
            self.num_kv_heads = int(config.get("multi_query_group_num", 1))
        self.uses_layer_norm = not config.get("rmsnorm", True)
        base = 10000.0 * float(config.get("rope_ratio", 1.0))
        self.rope = ReferenceRope(self.head_dim // 2, base, int(config.get("seq_length", 2048)))

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Split the fused matrices: q, k, v by heads; gate above up."""
        config, stem = self.config, f"{self.LAYERS}.{index}"
        everywhere = bool(config.get("add_bias_linear"))
        biased = everywhere or bool(config.get("add_qkv_bias"))
        qkv = self.read_linear(f"{stem}.self_attention.query_key_value", biased)
        up = self.read_linear(f"{stem}.mlp.dense_h_to_4h", everywhere)
        kv = self.num_kv_heads * self.head_dim
        sizes = {"q": self.num_heads * self.head_dim, "k": kv, "v": kv}
        inner = int(config["ffn_hidden_size"])
        return {
            **_split_fused_rows(qkv, sizes),
            **_split_fused_rows(up, {"gate": inner, "up": inner}),
            "o_proj": self.read_linear(f"{stem}.self_attention.dense", everywhere),
            "down": self.read_linear(f"{stem}.mlp.dense_4h_to_h", everywhere),
        }


def _split_fused_rows(fused: ModuleWeights, sizes: dict[str, int]) -> LayerWeights:
    out, first = {}, 0
    for name, rows in sizes.items():
        part = slice(first, first + rows)
        bias = None if fused.bias is None else fused.bias[part]
        out[name] = ModuleWeights(fused.weight[part], bias)
        first += rows
    return out


REFERENCE = ChatGlmReference
