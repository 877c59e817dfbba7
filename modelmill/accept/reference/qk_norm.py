"""A decoder that norms all of q and of k between the projections and the rotation.

In a trace the norm is "qk_norm", q's channels in front of k's. Norms of a head that all
heads share, as Qwen3's, are the family's own.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference

QK_NORM = "qk_norm"


class QKNormReference(PlainDecoderReference):
    """A decoder with such norms; a family reads their weights as "qk_norm".

    Attributes:
        norms_qk: whether the checkpoint has them.
    """

    norms_qk = True

    @abstractmethod
    def apply_qk_norm(self, q: Tensor, k: Tensor, weights: ModuleWeights) -> tuple[Tensor, Tensor]:
        """Norm q [T, heads·dim] and k [T, kv_heads·dim]."""

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        weights = super().layer_weights(index)
        if self.norms_qk:
            weights[QK_NORM] = self.norm_weights(index, QK_NORM)
        return weights

    def norm_qk_before_rope(self, r: LayerRecorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norm q and k, and record both side by side."""
        if not self.norms_qk:
            return q, k
        q_normed, k_normed = self.apply_qk_norm(q, k, r.weights[QK_NORM])
        r.record(QK_NORM, torch.cat((q_normed, k_normed), -1), q, k)
        return q_normed, k_normed

    def run_norm(self, index: int | None, name: str, x: Tensor) -> Tensor:
        """Run the reference norm on any input; of "qk_norm" on q, k and v side by side."""
        if name != QK_NORM:
            return super().run_norm(index, name, x)
        kv = self.num_kv_heads * self.head_dim
        widths = [self.num_heads * self.head_dim, kv, kv]
        q, k, v = x.to(self.device, self.dtype).split(widths, -1)
        return torch.cat((*self.apply_qk_norm(q, k, self.norm_weights(index, name)), v), -1)
