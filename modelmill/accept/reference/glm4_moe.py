"""glm4_moe: half of each head rotated, q and k normed in some (arXiv:2508.06471)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class Glm4MoeReference(PerHeadQKNormMixin, GroupLimitedExpertsMixin):
    """Glm4MoeForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, eps=1e-5, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_experts = self.config_int_or_default("n_routed_experts", 128)
        self.rope = self.build_partial_rope(factor=0.5)
        self.biased = self.projections_with_bias(names="qkv")
        if config.get("use_qk_norm"):
            self.norm_paths |= PER_HEAD_QK_NORM_PATHS

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; of heads, its channels as the engine stores them."""
        affine = super().norm_weights(index, name)
        return (
            ModuleWeights(affine.weight[self.engine_channel_order()])
            if name in PER_HEAD_QK_NORM_PATHS
            else affine
        )


REFERENCE = Glm4MoeReference
