"""olmo: LayerNorm without weights, q, k and v clipped in some (arXiv:2402.00838, section 2.1)."""

from __future__ import annotations

from typing import Any

import torch

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class OlmoReference(PlainDecoderReference):
    """OlmoForCausalLM."""

    DEFAULTS = ReferenceDefaults(theta=10000.0)
    uses_layer_norm = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.eps = 1e-5
        self.biased = self.projections_with_bias()
        self.qkv_bound = config.get("clip_qkv")

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """A norm has no weights."""
        del index, name
        return ModuleWeights(torch.ones(self.hidden_size))


REFERENCE = OlmoReference
