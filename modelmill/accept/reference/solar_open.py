"""solar_open: experts as in GLM-4.5 in every layer (the model card of Solar Open)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class SolarOpenReference(GroupLimitedExpertsMixin):
    """SolarOpenForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, eps=1e-5, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, {"n_routed_experts": 128} | config | {"first_k_dense_replace": 0})
        self.rope = self.build_partial_rope(theta=1000000.0)
        self.biased = self.projections_with_bias(names="qkv")


REFERENCE = SolarOpenReference
