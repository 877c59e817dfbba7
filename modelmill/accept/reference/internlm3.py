"""internlm3: LLaMA with switches for biases (InternLM3's model card and code)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("internlm3",)
NAME_PREFIX = "model."


class InternLM3Reference(PlainDecoderReference):
    """InternLM3ForCausalLM: ``qkv_bias`` for q, k, v, ``bias`` for the other projections."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_kv_heads = int(config.get("num_key_value_heads") or 2)
        self.head_dim = int(config.get("head_dim") or 128)
        self.score_scale = self.head_dim**-0.5
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        length = int(config.get("max_position_embeddings") or 32768)
        self.rope = rope_from_config(config, self.head_dim, length)
        qkv = config.get("qkv_bias", config.get("attention_bias"))
        others = config.get("bias", config.get("mlp_bias"))
        names = ("q", "k", "v") if qkv else ()
        self.biased = frozenset((*names, *(("o_proj", "gate", "up", "down") if others else ())))


REFERENCE = InternLM3Reference
