"""glm4_moe: half of each head rotated, q and k normed in some (arXiv:2508.06471)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import Affine, LayerRecorder, LayerWeights
from modelmill.accept.reference.grouped_experts import GroupedExpertsMixin
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("glm4_moe",)
NAME_PREFIX = "model."


class Glm4MoeReference(GroupedExpertsMixin):
    """Glm4MoeForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_kv_heads = int(config.get("num_key_value_heads") or 8)
        self.num_experts = self.read_count("n_routed_experts", 128)
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        length = int(config.get("max_position_embeddings") or 131072)
        self.rope = partial_rope(config, self.head_dim, length, factor=0.5)
        if config.get("attention_bias"):
            self.biased = frozenset("qkv")
        self.norms_qk = bool(config.get("use_qk_norm"))

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        weights = super().layer_weights(index)
        if self.norms_qk:
            for name in "qk":
                weights[f"{name}_norm"] = self._head_norm(index, name)
        return weights

    def _head_norm(self, index: int, name: str) -> Affine:
        """Return the weight of a norm of heads, its channels as the engine stores them."""
        weight = self.source.get(f"{self.LAYERS}.{index}.self_attn.{name}_norm.weight")
        return Affine(weight[self.engine_order()])

    def norm_qk(self, r: LayerRecorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norm each head of q and of k, if the model does."""
        if not self.norms_qk:
            return q, k
        return self._normed(q, r.weights["q_norm"]), self._normed(k, r.weights["k_norm"])

    def _normed(self, x: Tensor, weights: Affine) -> Tensor:
        heads = x.reshape(len(x), -1, self.head_dim)
        return self.apply_norm(heads, weights, self.eps).reshape(x.shape)

    @torch.no_grad()
    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor | None:
        """Return q after the norm of its heads and the rotation."""
        if not self.norms_qk:
            return None
        x = flat.to(self.device, self.dtype)
        return self.rotate(index, self._normed(x, self._head_norm(index, "q")), len(flat))


REFERENCE = Glm4MoeReference
