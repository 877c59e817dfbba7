"""falcon: parallel layers, one or few KV heads, rotation or ALiBi (arXiv:2311.16867)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.alibi import alibi_slopes
from modelmill.accept.reference.base import Affine, LayerWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("falcon",)
NAME_PREFIX = "transformer."


class FalconReference(PlainDecoderReference):
    """FalconForCausalLM."""

    EMBEDDING = "transformer.word_embeddings.weight"
    FINAL_NORM = "transformer.ln_f"
    LAYERS = "transformer.h"
    TIED_BY_DEFAULT = True
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        names = {
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "num_kv_heads": "n_head_kv",
        }
        own = {name: config[old] for name, old in names.items() if config.get(old) is not None}
        config = config | own
        super().__init__(source, config)
        new = bool(config.get("new_decoder_architecture"))
        parallel = bool(config.get("parallel_attn", True))
        self.head_dim = self.hidden_size // self.num_heads
        self.num_kv_heads = self.num_heads
        if new:
            self.num_kv_heads = int(config.get("num_kv_heads") or self.num_heads)
        elif config.get("multi_query", True):
            self.num_kv_heads = 1
        self.eps = float(config.get("layer_norm_epsilon", 1e-5))
        self.activation = self.read_activation("activation", "gelu")
        length = int(config.get("max_position_embeddings") or 2048)
        if config.get("alibi"):  # added before the scores are scaled
            self.alibi_slopes = [s * self.score_scale for s in alibi_slopes(self.num_heads)]
        else:
            self.rope = partial_rope(config, self.head_dim, length)
        self.has_bias = bool(config.get("bias"))
        self.mlp_norm = int(config.get("num_ln_in_parallel_attn") or (2 if new else 1)) == 2
        if parallel:
            self.layer = self.parallel
        self.norm_paths = {"input_norm": "input_layernorm"}
        if parallel and self.mlp_norm:
            self.norm_paths = {"input_norm": "ln_attn", "mlp_norm": "ln_mlp"}
        elif not parallel:
            self.norm_paths["mlp_norm"] = "post_attention_layernorm"

    def projections(self, index: int) -> LayerWeights:
        """Take q, k and v out of the rows of each KV head: its queries, its key, its value."""
        stem = f"{self.LAYERS}.{index}"
        fused = self.read_affine(f"{stem}.self_attention.query_key_value", self.has_bias)
        group = self.num_heads // self.num_kv_heads
        out: LayerWeights = {}
        for name, first, end in (("q", 0, group), ("k", -2, -1), ("v", -1, None)):
            rows = fused.weight.reshape(self.num_kv_heads, group + 2, self.head_dim, -1)
            bias = fused.bias
            if bias is not None:
                bias = bias.reshape(self.num_kv_heads, group + 2, -1)[:, first:end].reshape(-1)
            out[name] = Affine(rows[:, first:end].reshape(-1, self.hidden_size), bias)
        return out | {
            "o_proj": self.read_affine(f"{stem}.self_attention.dense", self.has_bias),
            "fc": self.read_affine(f"{stem}.mlp.dense_h_to_4h", self.has_bias),
            "down": self.read_affine(f"{stem}.mlp.dense_4h_to_h", self.has_bias),
        }


REFERENCE = FalconReference
