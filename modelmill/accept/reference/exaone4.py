"""exaone4: norms behind the branches and of each head of q and k (arXiv:2507.11407)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class Exaone4Reference(PerHeadQKNormMixin):
    """Exaone4ForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=32, eps=1e-5, theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.norm_paths = {
            "attn_post": "post_attention_layernorm",
            "mlp_post": "post_feedforward_layernorm",
            **PER_HEAD_QK_NORM_PATHS,
        }
        size = config.get("sliding_window", 4096)
        every = config.get("sliding_window_pattern", 4)
        self.windows = self.sliding_windows_by_layer(size, every)
        if size is not None:
            self.unrotated = frozenset(i for i, each in enumerate(self.windows) if each is None)
        self.layer = self.reordered_norm_layer


REFERENCE = Exaone4Reference
