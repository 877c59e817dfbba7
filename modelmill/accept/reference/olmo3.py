"""olmo3: OLMo 2 with windows; positions are scaled in layers with full attention only."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.olmo2 import Olmo2Reference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_ROPE_THETA = 500000.0


class Olmo3Reference(Olmo2Reference):
    """Olmo3ForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        parameters = config.get("rope_parameters") or {}
        full = {"rope_theta": config.get("rope_theta") or DEFAULT_ROPE_THETA}
        full |= parameters.get("full_attention") or {}
        full |= config.get("rope_scaling") or {}
        slow = {"rope_theta": DEFAULT_ROPE_THETA} | (parameters.get("sliding_attention") or {})
        plain = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta")}
        super().__init__(source, plain | {"rope_parameters": full})
        self.local_rope = rope_from_config(
            {"rope_parameters": slow}, self.head_dim, self.max_position
        )
        self.windows = self.sliding_windows_by_layer(int(config.get("sliding_window", 4096)), 4)


REFERENCE = Olmo3Reference
