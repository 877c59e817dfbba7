"""seed_oss: grouped attention with biases of q, k and v (the model card of Seed-OSS-36B)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import (
    MLP_LINEAR_NAMES,
    PlainDecoderReference,
    ReferenceDefaults,
)
from modelmill.accept.reference.tensor_source import TensorSource


class SeedOssReference(PlainDecoderReference):
    """SeedOssForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, positions=524288, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.projections_with_bias(names="qkv", default=True)
        self.biased |= self.projections_with_bias("attention_out_bias", ("o_proj",))
        self.biased |= self.projections_with_bias("mlp_bias", MLP_LINEAR_NAMES)


REFERENCE = SeedOssReference
