"""exaone4: norms behind the branches and of each head of q and k (arXiv:2507.11407)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import Affine, LayerRecorder, rms_norm
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("exaone4",)
NAME_PREFIX = "model."


class Exaone4Reference(PlainDecoderReference):
    """Exaone4ForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_kv_heads = int(config.get("num_key_value_heads", 32))
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        length = int(config.get("max_position_embeddings") or 2048)
        self.rope = rope_from_config(config, self.head_dim, length)
        self.norm_paths = {
            "attn_post": "post_attention_layernorm",
            "mlp_post": "post_feedforward_layernorm",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
        }
        size, types = config.get("sliding_window", 4096), config.get("layer_types")
        every = config.get("sliding_window_pattern", 4)
        for layer in range(self.num_layers):
            slides = types[layer] == "sliding_attention" if types else (layer + 1) % every != 0
            self.windows[layer] = size if slides else None
        if size is not None:
            self.unrotated = frozenset(i for i, each in enumerate(self.windows) if each is None)
        self.layer = self.post_norm

    def norm_qk(self, r: LayerRecorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norm each head of q and k."""
        return self._norm(q, r.weights["q_norm"]), self._norm(k, r.weights["k_norm"])

    def _norm(self, flat: Tensor, weights: Affine) -> Tensor:
        heads = flat.reshape(len(flat), -1, self.head_dim)
        return rms_norm(heads, weights, self.eps).reshape(flat.shape)

    @torch.no_grad()
    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor | None:
        """Return queries [T, heads·dim] after QK norm and RoPE."""
        q = self._norm(flat.to(self.device, self.dtype), self.norm_weights(index, "q_norm"))
        return q if index in self.unrotated else self.rotate(index, q, len(q))


REFERENCE = Exaone4Reference
