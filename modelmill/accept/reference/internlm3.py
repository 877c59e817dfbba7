"""internlm3: LLaMA with switches for biases (InternLM3's model card and code)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import (
    MLP_LINEAR_NAMES,
    PlainDecoderReference,
    ReferenceDefaults,
)
from modelmill.accept.reference.tensor_source import TensorSource


class InternLM3Reference(PlainDecoderReference):
    """InternLM3ForCausalLM: ``qkv_bias`` for q, k, v, ``bias`` for the other projections."""

    DEFAULTS = ReferenceDefaults(kv_heads=2, head_dim=128, eps=1e-5, positions=32768, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        qkv = config.get("qkv_bias", config.get("attention_bias"))
        others = config.get("bias", config.get("mlp_bias"))
        self.biased = frozenset(
            (*("qkv" if qkv else ""), *(("o_proj", *MLP_LINEAR_NAMES) if others else ()))
        )


REFERENCE = InternLM3Reference
