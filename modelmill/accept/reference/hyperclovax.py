"""hyperclovax: factors of µP (arXiv:2203.03466), norms around branches (arXiv:2502.02732)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class HyperCLOVAXReference(PlainDecoderReference):
    """HyperCLOVAXForCausalLM; the logits are multiplied by ``logits_scaling``."""

    DEFAULTS = ReferenceDefaults(theta=10000.0)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.biased_attention_and_mlp_projections()
        self.score_scale = float(config.get("attention_multiplier") or self.score_scale)
        self.embedding_scale = float(config.get("embedding_multiplier", 1.0))
        self.logit_scale = float(config.get("logits_scaling", 1.0))
        if config.get("use_post_norm", True):
            self.layer = self.sandwich_layer
            self.norm_paths |= {"attn_post": "post_norm1", "mlp_post": "post_norm2"}
        else:
            self.branch_scale = self.branch_multiplier

    @property
    def branch_multiplier(self) -> float:
        """Return the factor of each branch."""
        return float(self.config.get("residual_multiplier", 1.0))

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return the weight of a norm; behind a branch it has the branch's factor."""
        affine = super().norm_weights(index, name)
        is_behind = name in ("attn_post", "mlp_post")
        return (
            affine._replace(weight=affine.weight * self.branch_multiplier) if is_behind else affine
        )


REFERENCE = HyperCLOVAXReference
