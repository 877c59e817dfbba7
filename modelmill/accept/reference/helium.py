"""helium: neighbouring channels rotated (the model card of Helium 1)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import (
    MLP_LINEAR_NAMES,
    PlainDecoderReference,
    ReferenceDefaults,
)
from modelmill.accept.reference.tensor_source import TensorSource


class HeliumReference(PlainDecoderReference):
    """HeliumForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=20, head_dim=128, eps=1e-8, positions=4096, theta=1e5)
    has_interleaved_rope = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.projections_with_bias(names="qkv") | self.projections_with_bias(
            "mlp_bias", MLP_LINEAR_NAMES
        )


REFERENCE = HeliumReference
