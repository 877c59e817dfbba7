"""starcoder2: LayerNorm, an MLP of two matrices, windows (arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import (
    ATTENTION_LINEAR_NAMES,
    PROJECTION_PATHS,
    PlainDecoderReference,
    ReferenceDefaults,
)
from modelmill.accept.reference.tensor_source import TensorSource


class Starcoder2Reference(PlainDecoderReference):
    """Starcoder2ForCausalLM."""

    DEFAULTS = ReferenceDefaults(
        kv_heads=2, positions=4096, tied=True, theta=10000.0, activation="gelu_pytorch_tanh"
    )
    uses_layer_norm = True
    EPS_KEY = "norm_epsilon"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        attention = {name: PROJECTION_PATHS[name] for name in ATTENTION_LINEAR_NAMES}
        self.projection_paths = attention | {"fc": "mlp.c_fc", "down": "mlp.c_proj"}
        self.biased = self.projections_with_bias("use_bias", self.projection_paths, default=True)
        self.windows = [config.get("sliding_window")] * self.num_layers


REFERENCE = Starcoder2Reference
