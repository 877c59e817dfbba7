"""lfm3: convolutions as in LFM2, attention of two kinds with gated heads (the card of LFM3).

Layers with full attention rotate the first pairs of a head alone, by frequencies of whole heads.
"""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights
from modelmill.accept.reference.lfm2 import Lfm2Reference
from modelmill.accept.reference.per_head_qk_norm import PER_HEAD_QK_NORM_PATHS
from modelmill.accept.reference.plain_decoder import ReferenceDefaults
from modelmill.accept.reference.rope import layer_type_rope
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


def default_layer_type(layer: int) -> str:
    """Return what a layer is where the config does not say it."""
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer > 0 else "conv"


class Lfm3Reference(Lfm2Reference):
    """Lfm3ForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=4, head_dim=128, eps=1e-5, positions=128_000, tied=True)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        layers = range(int(config["num_hidden_layers"]))
        types = config.get("layer_types") or [default_layer_type(layer) for layer in layers]
        eps = config.get("norm_eps", config.get("rms_norm_eps", 1e-5))
        super().__init__(source, config | {"layer_types": types, "norm_eps": eps})
        self.norm_paths |= PER_HEAD_QK_NORM_PATHS
        if config.get("use_sandwich_norm", True):
            self.layer = self.sandwich_layer
            self.norm_paths |= {"attn_post": "post_operator_norm", "mlp_post": "post_ffn_norm"}
        self.projection_paths["o_proj"] = "self_attn.o_proj"
        self.biased = self.projections_with_bias()
        self.has_gates = bool(config.get("use_attention_gate", True))
        size = int(config.get("sliding_window", 256))
        self.windows = [size if each == "sliding_attention" else None for each in types]
        ropes = config.get("rope_parameters") or DEFAULT_ROPES
        self.rope, self.local_rope = (
            layer_type_rope(ropes[each], self.head_dim, self.max_position)
            for each in ("full_attention", "sliding_attention")
        )

    def token_mixer_weights(self, index: int) -> LayerWeights:
        """Read the projections of a layer's attention, with that of its gates."""
        weights = super().token_mixer_weights(index)
        if not self.has_gates:
            return weights
        stem = f"{self.LAYERS}.{index}.self_attn.gate_proj"
        return weights | {"attn_gate": self.read_linear(stem, False)}


REFERENCE = Lfm3Reference
