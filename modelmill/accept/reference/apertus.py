"""apertus: normed heads, xIELU between two matrices (arXiv:2509.14233, section 2.1).

xIELU (arXiv:2411.13010, equation 9): its integral is continuous at 0, where the slope is beta.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS, PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_ROPE_THETA = 12e6
DEFAULT_ROPE_PARAMETERS: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": DEFAULT_ROPE_THETA, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
XIELU_PARAMETER_NAMES = ("alpha_p", "alpha_n", "beta", "eps")


class ApertusReference(PerHeadQKNormMixin):
    """ApertusForCausalLM."""

    DEFAULTS = ReferenceDefaults(eps=1e-5, positions=65536)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        self.is_xielu = config.get("hidden_act", "xielu") == "xielu"
        super().__init__(source, config | ({"hidden_act": None} if self.is_xielu else {}))
        is_given = config.get("rope_scaling") or config.get("rope_parameters") is not None
        changes = {} if is_given else {"rope_parameters": DEFAULT_ROPE_PARAMETERS}
        self.rope = self.build_rope(theta=DEFAULT_ROPE_THETA, **changes)
        self.biased = self.projections_with_bias()
        self.norm_paths = {
            "input_norm": "attention_layernorm",
            "mlp_norm": "feedforward_layernorm",
            **PER_HEAD_QK_NORM_PATHS,
        }
        paths = {name: self.projection_paths[name] for name in ("q", "k", "v", "o_proj", "down")}
        self.projection_paths = paths | {"fc": "mlp.up_proj"}

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's matrices, and the numbers of its activation."""
        weights = super().mlp_weights(index)
        stem = f"{self.LAYERS}.{index}.mlp.act_fn"
        for name in XIELU_PARAMETER_NAMES if self.is_xielu else ():
            weights[name] = ModuleWeights(self.source.get(f"{stem}.{name}"))
        return weights

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run both matrices."""
        if not self.is_xielu:
            return super().mlp(r, normed)
        wide = r.linear("fc", normed)
        above, below, beta, eps = (float(r.weights[name].weight) for name in XIELU_PARAMETER_NAMES)
        rise = math.log1p(math.exp(above))
        fall = beta + math.log1p(math.exp(below))
        inner = beta * wide
        positive = wide > 0
        inner[positive] += rise * wide[positive] ** 2
        negative = wide[~positive]
        inner[~positive] += fall * (torch.expm1(negative.clamp(max=eps)) - negative)
        return r.linear("down", r.record("act", inner, wide))


REFERENCE = ApertusReference
