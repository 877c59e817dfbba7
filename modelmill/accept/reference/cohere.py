"""cohere: parallel layers; in R+ a LayerNorm of each head of q and k (the cards of Command R)."""

from __future__ import annotations

from typing import Any

import torch

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.stablelm import StableLmReference
from modelmill.accept.reference.tensor_source import TensorSource


class CohereReference(StableLmReference):
    """CohereForCausalLM."""

    DEFAULTS = ReferenceDefaults(positions=8192, tied=True)
    norm_bias = False
    has_interleaved_rope = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.head_dim = int(config.get("head_dim") or self.hidden_size // self.num_heads)
        self.score_scale = self.head_dim**-0.5
        self.rope = self.build_rope(theta=500000.0)
        self.biased = self.projections_with_bias()
        self.norms_qk = bool(config.get("use_qk_norm"))
        self.logit_scale = float(config.get("logit_scale", 0.0625))
        self.layer = self.parallel_branch_layer

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; of "qk_norm" the heads' weights one after another."""
        if name != "qk_norm":
            return super().norm_weights(index, name)
        stem = f"{self.LAYERS}.{index}.self_attn"
        weights = [self.source.get(f"{stem}.{part}_norm.weight").reshape(-1) for part in "qk"]
        return self.to_engine_channel_order(ModuleWeights(torch.cat(weights)))


REFERENCE = CohereReference
