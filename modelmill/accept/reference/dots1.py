"""dots1: attention with normed heads, experts as in DeepSeek-V3 (arXiv:2506.05767)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class Dots1Reference(PerHeadQKNormMixin, GroupLimitedExpertsMixin):
    """Dots1ForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=32, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, {"first_k_dense_replace": 0, "norm_topk_prob": False} | config)
        self.biased = self.projections_with_bias()
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        size, first = config.get("sliding_window", 4096), config.get("max_window_layers")
        types = config.get("layer_types") or [
            "sliding_attention" if i >= (62 if first is None else first) else ""
            for i in range(self.num_layers)
        ]
        self.windows = [size if each == "sliding_attention" else None for each in types]


REFERENCE = Dots1Reference
