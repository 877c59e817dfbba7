"""ministral3: queries times 1 + β · ln(1 + ⌊position / trained length⌋) (the model cards)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class Ministral3Reference(PlainDecoderReference):
    """Ministral3ForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, eps=1e-5, positions=262144)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        scaling = (
            config.get("rope_scaling") or config.get("rope_parameters") or DEFAULT_ROPE_PARAMETERS
        )
        self.slope, self.trained = read_attention_temperature(config, scaling)
        self.rope = self.build_rope(rope_scaling=scaling)
        self.windows = [config.get("sliding_window")] * self.num_layers

    def query_scaling_by_position(self, count: int) -> Tensor:
        """Return the factors of rotated queries, [count]."""
        factors = attention_temperature_factors(count, self.slope, self.trained)
        return torch.tensor(factors, dtype=self.dtype, device=self.device)


def read_attention_temperature(
    config: Mapping[str, Any], scaling: Mapping[str, Any]
) -> tuple[float, int]:
    """Return β, and the trained length; scaling: the config's ``rope_parameters``."""
    length = "original_max_position_embeddings"
    scales = scaling.get("rope_type", scaling.get("type")) in ("yarn", "llama3")
    outside = config.get(length) if scales else None
    return float(scaling["llama_4_scaling_beta"]), int(outside or scaling[length])


def attention_temperature_factors(count: int, slope: float, trained: int) -> list[float]:
    """Return the factors of the queries at the first positions."""
    periods = [position // trained for position in range(count)]
    return [1 + slope * math.log(1 + each) for each in periods]


REFERENCE = Ministral3Reference
