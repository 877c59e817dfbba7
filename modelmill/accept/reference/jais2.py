"""jais2: LayerNorm, an MLP of two matrices with the square of ReLU (the model card of Jais 2)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.arcee import PLAIN_MLP
from modelmill.accept.reference.plain_decoder import (
    MIXER,
    PROJECTIONS,
    Defaults,
    PlainDecoderReference,
)
from modelmill.accept.reference.tensor_source import TensorSource


class Jais2Reference(PlainDecoderReference):
    """Jais2ForCausalLM."""

    DEFAULTS = Defaults(positions=8192)
    uses_layer_norm = True
    EPS_KEY = "layer_norm_eps"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.activation = self.read_activation("hidden_act", "relu2")
        self.rope = self.build_rope()
        self.projection_paths = {name: PROJECTIONS[name] for name in MIXER} | PLAIN_MLP
        self.biased = self.projections_with_bias(default=True) | self.projections_with_bias(
            "mlp_bias", PLAIN_MLP, default=True
        )


REFERENCE = Jais2Reference
