"""stablelm: LayerNorm, a part of each head rotated, serial or parallel (arXiv:2402.17834)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights, layer_norm
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.qk_norm import QKNormReference
from modelmill.accept.reference.tensor_source import TensorSource


class StableLmReference(QKNormReference):
    """StableLmForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=32, positions=4096)
    uses_layer_norm = True
    EPS_KEY = "layer_norm_eps"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config | {"head_dim": None})
        self.rope = self.build_partial_rope(factor=0.25)
        self.biased = self.projections_with_bias("use_qkv_bias", "qkv")
        self.norms_qk = bool(config.get("qk_layernorm"))
        if config.get("use_parallel_residual"):
            self.layer = self.parallel_branch_layer

    def norm_module_names(self) -> list[str]:
        """Return the names of a layer's norms; a parallel layer has one."""
        serial = self.layer == self.pre_norm_layer
        return ["input_norm", *(["mlp_norm"] if serial else [])]

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return weight and bias of a norm; of "qk_norm" the heads' weights one after another."""
        if name != "qk_norm":
            return super().norm_weights(index, name)
        stem = f"{self.LAYERS}.{index}.self_attn"
        weights = [
            self.source.get(f"{stem}.{part}_layernorm.norms.{head}.weight")
            for part, count in (("q", self.num_heads), ("k", self.num_kv_heads))
            for head in range(count)
        ]
        return self.to_engine_channel_order(ModuleWeights(torch.cat(weights)))

    def apply_qk_norm(self, q: Tensor, k: Tensor, weights: ModuleWeights) -> tuple[Tensor, Tensor]:
        """Norm each head of q and k by itself."""
        normed = self._norm_per_head(torch.cat((q, k), -1), weights)
        return normed[:, : q.shape[1]], normed[:, q.shape[1] :]

    def _norm_per_head(self, x: Tensor, weights: ModuleWeights) -> Tensor:
        heads = x.reshape(len(x), -1, self.head_dim)
        by_head = ModuleWeights(weights.weight.reshape(-1, self.head_dim))
        return layer_norm(heads, by_head, self.eps).reshape(x.shape)


REFERENCE = StableLmReference
