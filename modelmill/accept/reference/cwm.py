"""cwm: full attention in layers 0, 4, 8, …, windows in the others (arXiv:2510.02387)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import (
    MLP_LINEAR_NAMES,
    PlainDecoderReference,
    ReferenceDefaults,
)
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class CwmReference(PlainDecoderReference):
    """CwmForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, eps=1e-5, positions=131072)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        is_given = config.get("rope_scaling") or config.get("rope_parameters") is not None
        changes = {} if is_given else {"rope_parameters": DEFAULT_ROPE_PARAMETERS}
        self.rope = self.build_rope(theta=1e6, **changes)
        self.biased = self.projections_with_bias("mlp_bias", MLP_LINEAR_NAMES)
        size, types = config.get("sliding_window", 8192), config.get("layer_types")
        for layer in range(self.num_layers):
            is_full = layer % 4 == 0 if types is None else types[layer] == "full_attention"
            self.windows[layer] = None if is_full else size


REFERENCE = CwmReference
