"""arcee: an MLP of two matrices with the square of ReLU (arXiv:2109.08668)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import (
    ATTENTION_LINEAR_NAMES,
    PROJECTION_PATHS,
    PlainDecoderReference,
    ReferenceDefaults,
)
from modelmill.accept.reference.tensor_source import TensorSource

PLAIN_MLP_PATHS = {"fc": "mlp.up_proj", "down": "mlp.down_proj"}


class ArceeReference(PlainDecoderReference):
    """ArceeForCausalLM; HAS_BIAS: whether projections have one where config.json is silent."""

    DEFAULTS = ReferenceDefaults(eps=1e-5, positions=4096, theta=10000.0, activation="relu2")
    HAS_BIAS = False

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.projection_paths = {
            name: PROJECTION_PATHS[name] for name in ATTENTION_LINEAR_NAMES
        } | PLAIN_MLP_PATHS
        attention = self.projections_with_bias(default=self.HAS_BIAS)
        mlp = self.projections_with_bias("mlp_bias", PLAIN_MLP_PATHS, default=self.HAS_BIAS)
        self.biased = attention | mlp


REFERENCE = ArceeReference
