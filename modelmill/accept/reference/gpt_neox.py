"""gpt_neox: parallel layers, q, k and v stored head by head (arXiv:2204.06745)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import Affine, LayerWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("gpt_neox",)
NAME_PREFIX = "gpt_neox."


class GptNeoXReference(PlainDecoderReference):
    """GPTNeoXForCausalLM."""

    EMBEDDING = "gpt_neox.embed_in.weight"
    FINAL_NORM = "gpt_neox.final_layer_norm"
    LAYERS = "gpt_neox.layers"
    HEAD = "embed_out.weight"
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.eps = float(config.get("layer_norm_eps", 1e-5))
        self.activation = self.read_activation("hidden_act", "gelu")
        length = int(config.get("max_position_embeddings") or 2048)
        self.rope = partial_rope(
            config,
            self.head_dim,
            length,
            factor=float(config.get("rotary_pct", 0.25)),
            theta=float(config.get("rotary_emb_base", 10000.0)),
        )
        self.has_attention_bias = bool(config.get("attention_bias", True))
        self.mlp_norm = True
        if config.get("use_parallel_residual", True):
            self.layer = self.parallel

    def projections(self, index: int) -> LayerWeights:
        """Take q, k and v out of the rows of each head."""
        stem = f"{self.LAYERS}.{index}"
        fused = self.read_affine(f"{stem}.attention.query_key_value", self.has_attention_bias)
        rows = fused.weight.reshape(self.num_heads, 3, self.head_dim, -1)
        out: LayerWeights = {}
        for part, name in enumerate(("q", "k", "v")):
            bias = None
            if fused.bias is not None:
                bias = fused.bias.reshape(self.num_heads, 3, -1)[:, part].reshape(-1)
            out[name] = Affine(rows[:, part].reshape(self.hidden_size, -1), bias)
        return out | {
            "o_proj": self.read_affine(f"{stem}.attention.dense", self.has_attention_bias),
            "fc": self.read_affine(f"{stem}.mlp.dense_h_to_4h", True),
            "down": self.read_affine(f"{stem}.mlp.dense_4h_to_h", True),
        }


REFERENCE = GptNeoXReference
