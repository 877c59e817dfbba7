"""internlm: LLaMA with biases in the attention (InternLM's technical report)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource


class InternLMReference(PlainDecoderReference):
    """InternLMForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        rotary = config.get("rotary") or {}
        kind = {"origin": "default"}.get(rotary.get("type", "origin"), "dynamic")
        self.rope = ReferenceRope(
            self.head_dim,
            float(rotary.get("base", config.get("rope_theta") or 10000.0)),
            self.max_position,
            kind,
            {"factor": rotary.get("scaling_factor", 1.0)},
        )
        self.biased = self.projections_with_bias("bias", default=True)


REFERENCE = InternLMReference
