"""hunyuan_v1_dense, hunyuan_v1_moe: queries and keys are rotated, then normed by head.

The rotation's base is theta · alpha^(d / (d − 2)) at every length (Hunyuan-A13B technical report,
section 2; the NTK-aware base of arXiv:2309.00071, section 3.1). Experts: a softmax over all, of
which the chosen sum to 1, beside one expert of every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import LayerRecorder, LayerWeights, ModuleWeights
from modelmill.accept.reference.moe import QWEN_EXPERT_MATRIX_NAMES, ExpertsMixin
from modelmill.accept.reference.per_head_qk_norm import PerHeadQKNormMixin
from modelmill.accept.reference.plain_decoder import (
    ReferenceDefaults,
    reference_factory_by_model_type,
)
from modelmill.accept.reference.rope import ReferenceRope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("hunyuan_v1_dense", "hunyuan_v1_moe")
PER_HEAD_QK_NORM_PATHS = {
    "q_norm": "self_attn.query_layernorm",
    "k_norm": "self_attn.key_layernorm",
}


class HunyuanReference(PerHeadQKNormMixin):
    """HunYuanDenseV1ForCausalLM."""

    DEFAULTS = ReferenceDefaults(eps=1e-5)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        head_dim = config.get("head_dim") or config.get("attention_head_dim")
        super().__init__(source, config | {"head_dim": head_dim})
        self.rope = self._build_ntk_rope()
        self.biased = self.projections_with_bias()
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS

    def _build_ntk_rope(self) -> ReferenceRope:
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        alpha, dim = float(scaling.get("alpha") or 0), self.head_dim
        if not alpha:
            return self.build_rope()
        theta = float(scaling.get("rope_theta") or self.config.get("rope_theta") or 1e4)
        return ReferenceRope(dim, theta * alpha ** (dim / (dim - 2)), self.max_position)

    def run_token_mixer(
        self, index: int, r: LayerRecorder, normed: Tensor, prompt_length: int
    ) -> Tensor:
        """Run a layer's attention up to its output projection."""
        q, k, v = (r.linear(name, normed) for name in ("q", "k", "v"))
        turned = {
            name: self.apply_rope_to_heads(index, x, prompt_length)
            for name, x in (("q", q), ("k", k))
        }
        for name, x in (("q", q), ("k", k)):
            r.record(f"{name}_turned", turned[name], x)
        q, k = (
            r.record(
                f"{name}_rot",
                self.norm_per_head(turned[name], r.weights[f"{name}_norm"]),
                turned[name],
            )
            for name in "qk"
        )
        return r.linear("o_proj", self.run_and_record_attention(index, r, q, k, v))

    @torch.no_grad()
    def norm_and_rope_queries(self, index: int, flat: Tensor) -> Tensor:
        """Return rotated queries [T, heads·dim] behind their norm."""
        x = flat.to(self.device, self.dtype)
        return self.norm_per_head(x, self.norm_weights(index, "q_norm"))


class HunyuanMoeReference(HunyuanReference, ExpertsMixin):
    """HunYuanMoEV1ForCausalLM."""

    router_path = "mlp.gate.wg"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        top_k = config.get("moe_topk") or config.get("num_experts_per_tok")
        top_k = top_k[0] if isinstance(top_k, list) else top_k
        super().__init__(source, config | {"num_experts_per_tok": top_k})
        self.rope = self._build_ntk_rope()

    def make_rope(self, config: dict[str, Any], length: int) -> ReferenceRope:
        """Return the rotation."""
        del config, length
        return self._build_ntk_rope()

    def mlp_weights(self, index: int) -> LayerWeights:
        """Read a layer's router, experts and the expert of every token."""
        stem = f"{self.LAYERS}.{index}.mlp.shared_mlp"
        shared: dict[str, ModuleWeights] = {
            f"shared_expert.{name}": self.read_linear(f"{stem}.{path}", False)
            for name, path in QWEN_EXPERT_MATRIX_NAMES.items()
        }
        return super().mlp_weights(index) | shared

    def run_shared_expert(self, r: LayerRecorder, x: Tensor) -> Tensor:
        """Run the expert that every token has; nothing gates it."""
        return self.run_expert(r, "shared_expert", x)


REFERENCE = reference_factory_by_model_type(
    {"hunyuan_v1_dense": HunyuanReference, "hunyuan_v1_moe": HunyuanMoeReference}
)
