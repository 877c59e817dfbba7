"""olmo2: norms behind the branches, and over all of q and of k (arXiv:2501.00656)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights, rms_norm
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.qk_norm import QKNormReference
from modelmill.accept.reference.tensor_source import TensorSource


class Olmo2Reference(QKNormReference):
    """Olmo2ForCausalLM."""

    DEFAULTS = ReferenceDefaults(eps=1e-5)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self.build_rope()
        self.biased = self.projections_with_bias()
        self.norm_paths = {
            "attn_post": "post_attention_layernorm",
            "mlp_post": "post_feedforward_layernorm",
        }
        self.layer = self.reordered_norm_layer

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; of "qk_norm" q's, then k's."""
        if name != "qk_norm":
            return super().norm_weights(index, name)
        stem = f"{self.LAYERS}.{index}.self_attn"
        return ModuleWeights(torch.cat([self.source.get(f"{stem}.{n}_norm.weight") for n in "qk"]))

    def apply_qk_norm(self, q: Tensor, k: Tensor, weights: ModuleWeights) -> tuple[Tensor, Tensor]:
        """Norm all heads of q together, and all heads of k together."""
        q_weight, k_weight = weights.weight.split([q.shape[-1], k.shape[-1]])
        return rms_norm(q, ModuleWeights(q_weight), self.eps), rms_norm(
            k, ModuleWeights(k_weight), self.eps
        )


REFERENCE = Olmo2Reference
