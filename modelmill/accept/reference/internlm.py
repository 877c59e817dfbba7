"""internlm: LLaMA with biases in the attention (InternLM's technical report)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("internlm",)
NAME_PREFIX = "model."


class InternLMReference(PlainDecoderReference):
    """InternLMForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        rotary = config.get("rotary") or {}
        kind = {"origin": "default"}.get(rotary.get("type", "origin"), "dynamic")
        self.rope = ReferenceRope(
            self.head_dim,
            float(rotary.get("base", config.get("rope_theta") or 10000.0)),
            int(config.get("max_position_embeddings") or 2048),
            kind,
            {"factor": rotary.get("scaling_factor", 1.0)},
        )
        if config.get("bias", True):
            self.biased = frozenset(("q", "k", "v", "o_proj"))


REFERENCE = InternLMReference
