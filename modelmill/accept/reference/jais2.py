"""jais2: LayerNorm, an MLP of two matrices with the square of ReLU (the model card of Jais 2)."""

from __future__ import annotations

from modelmill.accept.reference.arcee import ArceeReference
from modelmill.accept.reference.plain_decoder import ReferenceDefaults


class Jais2Reference(ArceeReference):
    """Jais2ForCausalLM."""

    DEFAULTS = ReferenceDefaults(positions=8192, theta=10000.0, activation="relu2")
    uses_layer_norm = True
    EPS_KEY = "layer_norm_eps"
    HAS_BIAS = True


REFERENCE = Jais2Reference
