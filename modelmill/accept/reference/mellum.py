"""mellum: Qwen3-MoE's layers; those with a window rotate by another base (the model card)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.moe import ExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_ROPE_THETAS = {"full_attention": 500000.0, "sliding_attention": 10000.0}


class MellumReference(PerHeadQKNormMixin, ExpertsMixin):
    """MellumForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=4, head_dim=128, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        by_type = config.get("rope_parameters") or {}
        plain = {key: value for key, value in config.items() if key != "rope_parameters"}
        super().__init__(source, {"num_key_value_heads": 4} | plain)
        self.rope, self.local_rope = (
            rope_from_config(
                {"rope_parameters": {"rope_theta": base} | (by_type.get(kind) or {})},
                self.head_dim, self.max_position,
            )
            for kind, base in DEFAULT_ROPE_THETAS.items()
        )  # fmt: skip
        self.renormalizes = bool(config.get("norm_topk_prob", True))
        self.biased = self.projections_with_bias()
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        size, types = config.get("sliding_window", 1024), config.get("layer_types")
        for layer, kind in enumerate(types or ()):
            self.windows[layer] = size if kind == "sliding_attention" else None
        kinds = config.get("mlp_layer_types") or ()
        self.dense_layers = {layer for layer, kind in enumerate(kinds) if kind == "dense"}


REFERENCE = MellumReference
