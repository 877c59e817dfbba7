"""granite_swa: Granite with windows, sinks and layers that do not rotate (the model cards)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modelmill.accept.reference.granite import GraniteReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class GraniteSWAReference(GraniteReference):
    """GraniteSWAForCausalLM: every fourth layer, from 0 on, has full attention."""

    DEFAULTS = ReferenceDefaults(kv_heads=4, eps=1e-5, positions=8192, tied=True)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        bases = config.get("layer_rope_theta") or []
        self.unrotated = frozenset(i for i, base in enumerate(bases) if base == 0)
        size, types = config.get("sliding_window", 128), config.get("layer_types")
        for layer in range(self.num_layers):
            is_full = layer % 4 == 0 if types is None else types[layer] == "full_attention"
            self.windows[layer] = None if is_full else size
        key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        for layer, base in enumerate(bases):
            scaling = {**(config.get(key) or {}), "rope_theta": base}
            if base and self.windows[layer] is None:
                self.rope = self.build_rope(**{"rope_theta": base, key: scaling})
            elif base:
                self.local_rope = self.build_rope(**{"rope_theta": base, key: scaling})

    def attention_sinks(self, index: int) -> Tensor | None:
        """Return the sinks [heads] of a layer."""
        return self.source.get(f"{self.LAYERS}.{index}.self_attn.sinks")


REFERENCE = GraniteSWAReference
