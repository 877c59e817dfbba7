"""A decoder that norms each head of q and of k, with weights that all heads share.

The names in a trace's weights are "q_norm" and "k_norm".
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference

PER_HEAD_QK_NORM_PATHS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


class PerHeadQKNormMixin(PlainDecoderReference):
    """A decoder with such norms, which are among its ``norm_paths``."""

    @property
    def has_qk_norm(self) -> bool:
        """Return whether the checkpoint has them."""
        return "q_norm" in self.norm_paths

    def norm_per_head(self, flat: Tensor, weights: ModuleWeights) -> Tensor:
        """Norm each head of [T, heads·dim]."""
        heads = flat.reshape(len(flat), -1, self.head_dim)
        return self.apply_norm(heads, weights, self.eps).reshape(flat.shape)

    def norm_qk_before_rope(self, r: LayerRecorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norm each head of q and k."""
        if not self.has_qk_norm:
            return q, k
        return self.norm_per_head(q, r.weights["q_norm"]), self.norm_per_head(
            k, r.weights["k_norm"]
        )

    @torch.no_grad()
    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor | None:
        """Return queries [T, heads·dim] after QK norm and RoPE; None without QK norm."""
        if not self.has_qk_norm:
            return None
        x = flat.to(self.device, self.dtype)
        q = self.norm_per_head(x, self.norm_weights(index, "q_norm"))
        return q if index in self.unrotated else self.apply_rope_to_heads(index, q, len(q))
