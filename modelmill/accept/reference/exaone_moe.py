"""exaone_moe: normed heads, windows that alone rotate, experts (the report of K-EXAONE)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.group_limited_experts import GroupLimitedExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class ExaoneMoeReference(PerHeadQKNormMixin, GroupLimitedExpertsMixin):
    """ExaoneMoeForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=32, eps=1e-5, theta=10000.0)
    SELECTION_BIAS = "mlp.e_score_correction_bias"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        experts = {"n_routed_experts": config.get("num_experts") or 64}
        super().__init__(source, {"routed_scaling_factor": 2.5} | config | experts)
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        size = config.get("sliding_window", 4096)
        if size is not None:
            pattern = config.get("sliding_window_pattern") or 4
            every = 4 if isinstance(pattern, str) else int(pattern)
            self.windows = self.sliding_windows_by_layer(int(size), every)
            self.unrotated = frozenset(i for i, each in enumerate(self.windows) if each is None)
        self.mlp_types = config.get("mlp_layer_types")
        marks = config.get("is_moe_layer")
        if self.mlp_types is None and marks is not None:
            self.mlp_types = ["sparse" if each else "dense" for each in marks]

    def unused_tensor_patterns(self) -> dict[str, str]:
        """Return those of multi-token prediction."""
        return {r"mtp\..*": "the layers of multi-token prediction"}


REFERENCE = ExaoneMoeReference
