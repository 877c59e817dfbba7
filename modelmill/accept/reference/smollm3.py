"""smollm3: layers without rotation (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class SmolLM3Reference(PlainDecoderReference):
    """SmolLM3ForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=4, positions=32768, tied=True, theta=2000000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.biased_attention_and_mlp_projections()
        marks = config.get("no_rope_layers")
        every = int(config.get("no_rope_layer_interval", 4))
        if marks is None:
            marks = [int((layer + 1) % every != 0) for layer in range(self.num_layers)]
        self.unrotated = frozenset(i for i in range(self.num_layers) if marks[i] == 0)
        size = config.get("sliding_window") if config.get("use_sliding_window") else None
        types = config.get("layer_types")
        for layer in range(self.num_layers):
            slides = types[layer] == "sliding_attention" if types else layer in self.unrotated
            self.windows[layer] = size if slides else None


REFERENCE = SmolLM3Reference
