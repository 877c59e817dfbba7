"""olmo2: norms behind the branches, and over all of q and of k (arXiv:2501.00656)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import Affine, LayerRecorder, LayerWeights, rms_norm
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("olmo2",)
NAME_PREFIX = "model."


class Olmo2Reference(PlainDecoderReference):
    """Olmo2ForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        length = int(config.get("max_position_embeddings") or 2048)
        self.rope = rope_from_config(config, self.head_dim, length)
        if config.get("attention_bias"):
            self.biased = frozenset(("q", "k", "v", "o_proj"))
        self.norm_paths = {
            "attn_post": "post_attention_layernorm",
            "mlp_post": "post_feedforward_layernorm",
        }
        self.layer = self.post_norm

    def norm_weights(self, index: int | None, name: str) -> Affine:
        """Return the weight of a norm; of "qk_norm" q's, then k's."""
        if name != "qk_norm":
            return super().norm_weights(index, name)
        stem = f"{self.LAYERS}.{index}.self_attn"
        return Affine(torch.cat([self.source.get(f"{stem}.{n}_norm.weight") for n in "qk"]))

    def layer_weights(self, index: int) -> LayerWeights:
        """Read the weights of one layer in float32."""
        return super().layer_weights(index) | {"qk_norm": self.norm_weights(index, "qk_norm")}

    def norm_qk(self, r: LayerRecorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norm all heads of q together, and all heads of k together."""
        q_normed, k_normed = self._norm_both(q, k, r.weights["qk_norm"])
        r.record("qk_norm", torch.cat((q_normed, k_normed), -1), q, k)
        return q_normed, k_normed

    def run_norm(self, index: int | None, name: str, x: Tensor) -> Tensor:
        """Run the reference norm on any input; of "qk_norm" on q, k and v side by side."""
        if name != "qk_norm":
            return super().run_norm(index, name, x)
        kv = self.num_kv_heads * self.head_dim
        widths = [self.num_heads * self.head_dim, kv, kv]
        q, k, v = x.to(self.device, self.dtype).split(widths, -1)
        return torch.cat((*self._norm_both(q, k, self.norm_weights(index, name)), v), -1)

    def _norm_both(self, q: Tensor, k: Tensor, weights: Affine) -> tuple[Tensor, Tensor]:
        q_weight, k_weight = weights.weight.split([q.shape[-1], k.shape[-1]])
        return rms_norm(q, Affine(q_weight), self.eps), rms_norm(k, Affine(k_weight), self.eps)


REFERENCE = Olmo2Reference
