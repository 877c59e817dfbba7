"""internlm2: LLaMA with q, k and v in one matrix, by KV head (arXiv:2403.17297)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import Affine, LayerWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("internlm2",)
NAME_PREFIX = "model."


class InternLM2Reference(PlainDecoderReference):
    """InternLM2ForCausalLM."""

    EMBEDDING = "model.tok_embeddings.weight"
    HEAD = "output.weight"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        length = int(config.get("max_position_embeddings") or 2048)
        self.rope = rope_from_config(config, self.head_dim, length)
        self.norm_paths = {"input_norm": "attention_norm", "mlp_norm": "ffn_norm"}
        self.has_bias = bool(config.get("bias", True))

    def projections(self, index: int) -> LayerWeights:
        """Take q, k and v out of the rows of each KV head: its queries, its key, its value."""
        stem = f"{self.LAYERS}.{index}"
        fused = self.read_affine(f"{stem}.attention.wqkv", self.has_bias)
        group = self.num_heads // self.num_kv_heads
        parts = {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, None)}
        out: LayerWeights = {}
        for name, part in parts.items():
            rows = fused.weight.reshape(self.num_kv_heads, group + 2, self.head_dim, -1)
            bias = fused.bias
            if bias is not None:
                bias = bias.reshape(self.num_kv_heads, group + 2, -1)[:, part].reshape(-1)
            out[name] = Affine(rows[:, part].reshape(-1, self.hidden_size), bias)
        mlp = {"gate": "w1", "up": "w3", "down": "w2"}
        return out | {
            "o_proj": self.read_affine(f"{stem}.attention.wo", self.has_bias),
            **{
                name: self.read_affine(f"{stem}.feed_forward.{each}", False)
                for name, each in mlp.items()
            },
        }


REFERENCE = InternLM2Reference
