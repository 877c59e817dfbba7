"""phimoe: LayerNorm, LongRoPE, two experts chosen by SparseMixer (arXiv:2409.12136, section 2.2).

The first expert has the largest logit θ; its weight is the softmax over the experts i with
(θ_max − θ_i) / max(|θ_i|, θ_max) ≤ 2r, r the noise of training. The second one is chosen from the
others in the same way. Cosines and sines carry ``short_mscale`` up to the trained length, beyond it
``long_mscale`` (arXiv:2402.13753).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder
from modelmill.accept.reference.moe import MIXTRAL_EXPERT_MATRIX_NAMES, ExpertsMixin
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource


class PhimoeReference(ExpertsMixin):
    """PhimoeForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, eps=1e-5, positions=131072)
    uses_layer_norm = True
    router_path = "block_sparse_moe.gate"
    experts_path = "block_sparse_moe.experts"
    expert_names = MIXTRAL_EXPERT_MATRIX_NAMES

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self._build_longrope()
        self.biased = self.projections_with_bias()
        self.windows = [config.get("sliding_window")] * self.num_layers
        noise = config.get("router_jitter_noise")
        self.noise = 0.01 if noise is None else float(noise)

    def make_rope(self, config: dict[str, Any], length: int) -> ReferenceRope:
        """Return the rotation."""
        del config, length
        return self._build_longrope()

    def _build_longrope(self) -> ReferenceRope:
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        theta = float(scaling.get("rope_theta") or self.config.get("rope_theta") or 1e6)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return ReferenceRope(self.head_dim, theta, self.max_position)
        trained = "original_max_position_embeddings"
        options = {"attention_factor": scaling["short_mscale"], **scaling}
        if self.config.get(trained):
            options[trained] = self.config[trained]
        return ReferenceRope(self.head_dim, theta, self.max_position, "longrope", options)

    def mlp(self, r: LayerRecorder, normed: Tensor) -> Tensor:
        """Run both experts of each token."""
        logits = r.linear("router", normed)
        routing = torch.stack([self._sparsemixer_weights_for_one_token(row) for row in logits])
        total = self.run_and_combine_experts(r, normed, routing, logits, self.run_expert)
        return r.record("mlp_out", total, normed)

    def _sparsemixer_weights_for_one_token(self, logits: Tensor) -> Tensor:
        """Return the weights [E] of one token's experts."""
        weights, left = torch.zeros_like(logits), list(range(len(logits)))
        for _ in range(2):
            best = max(left, key=lambda expert: float(logits[expert]))
            top = logits[best]
            rivals = [
                e for e in left
                if (top - logits[e]) / torch.maximum(logits[e].abs(), top) <= 2 * self.noise
            ]  # fmt: skip
            weights[best] = 1 / (logits[rivals] - top).exp().sum()
            left.remove(best)
        return weights

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Add the head's bias."""
        biased = self.config.get("lm_head_bias")
        return logits + self.source.get("lm_head.bias") if biased else logits


REFERENCE = PhimoeReference
