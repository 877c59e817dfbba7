"""cohere2: parallel layers, rotation in layers with a window only (arXiv:2504.00698)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class Cohere2Reference(PlainDecoderReference):
    """Cohere2ForCausalLM."""

    DEFAULTS = ReferenceDefaults(positions=8192, tied=True, theta=10000.0)
    uses_layer_norm = True
    norm_bias = False
    has_interleaved_rope = True
    EPS_KEY = "layer_norm_eps"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.norm_paths = {"input_norm": "input_layernorm"}
        self.biased = self.projections_with_bias()
        self.logit_scale = float(config.get("logit_scale", 0.0625))
        every = int(config.get("sliding_window_pattern") or 4)
        self.windows = self.sliding_windows_by_layer(int(config.get("sliding_window", 4096)), every)
        self.unrotated = frozenset(i for i, size in enumerate(self.windows) if size is None)
        self.layer = self.parallel_branch_layer


REFERENCE = Cohere2Reference
