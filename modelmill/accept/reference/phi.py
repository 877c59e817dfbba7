"""phi: parallel layers behind one norm, biases everywhere (arXiv:2309.05463)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference.base import ModuleWeights, layer_norm
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.qk_norm import QKNormReference
from modelmill.accept.reference.tensor_source import TensorSource


class SharedQKLayerNormReference(QKNormReference):
    """A decoder with one LayerNorm of all heads of q, and one of all heads of k."""

    DEFAULTS = ReferenceDefaults(activation="gelu_new")
    FINAL_NORM = "model.final_layernorm"
    uses_layer_norm = True
    EPS_KEY = "layer_norm_eps"

    def norm_weights(self, index: int | None, name: str) -> ModuleWeights:
        """Return weight and bias of a norm; of "qk_norm" q's values, then k's."""
        if name != "qk_norm":
            return super().norm_weights(index, name)
        stem = f"{self.LAYERS}.{index}.self_attn"
        weight, bias = (
            torch.cat([self.source.get(f"{stem}.{part}_layernorm.{kind}") for part in "qk"])
            for kind in ("weight", "bias")
        )
        return self.to_engine_channel_order(ModuleWeights(weight, bias))

    def apply_qk_norm(self, q: Tensor, k: Tensor, weights: ModuleWeights) -> tuple[Tensor, Tensor]:
        """Norm each head of q with one weight, each of k with another."""
        assert weights.bias is not None, "these norms have a bias"
        values = zip(weights.weight.chunk(2), weights.bias.chunk(2), strict=True)
        q_norm, k_norm = (ModuleWeights(*each) for each in values)

        def norm(flat: Tensor, affine: ModuleWeights) -> Tensor:
            heads = flat.reshape(len(flat), -1, self.head_dim)
            return layer_norm(heads, affine, self.eps).reshape(flat.shape)

        return norm(q, q_norm), norm(k, k_norm)


class PhiReference(SharedQKLayerNormReference):
    """PhiForCausalLM; its head has a bias."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.activation = self.activation_from_config("hidden_act", "gelu_new")
        self.rope = self.build_partial_rope(factor=0.5)
        self.norm_paths = {"input_norm": "input_layernorm"}
        attention = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v")}
        mlp = {"fc": "mlp.fc1", "down": "mlp.fc2"}
        self.projection_paths = attention | {"o_proj": "self_attn.dense"} | mlp
        self.biased = frozenset(self.projection_paths)
        self.norms_qk = bool(config.get("qk_layernorm"))
        self.layer = self.parallel_branch_layer

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Add the head's bias."""
        return logits + self.source.get("lm_head.bias")


REFERENCE = PhiReference
