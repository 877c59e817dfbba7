"""glm and glm4: half of each head rotated by neighbouring channels (arXiv:2406.12793)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("glm", "glm4")


class GlmReference(PlainDecoderReference):
    """GlmForCausalLM; Glm4ForCausalLM has a norm behind each branch, too."""

    DEFAULTS = ReferenceDefaults(kv_heads=2, head_dim=128, eps=1.5625e-7, positions=131072)
    has_interleaved_rope = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self.build_partial_rope(factor=0.5)
        self.biased = self.projections_with_bias(names="qkv", default=True)
        if config["model_type"] == "glm4":
            self.layer = self.sandwich_layer
            self.norm_paths |= {
                "attn_post": "post_self_attn_layernorm",
                "mlp_post": "post_mlp_layernorm",
            }

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Split the MLP's fused matrix: gate above up."""
        stem = f"{self.LAYERS}.{index}"
        gate, up = self.source.get(f"{stem}.mlp.gate_up_proj.weight").chunk(2)
        fused = {"gate": ModuleWeights(gate), "up": ModuleWeights(up)}
        return fused | {
            name: self.read_linear(f"{stem}.{path}", name in self.biased)
            for name, path in self.projection_paths.items()
            if name not in fused
        }


REFERENCE = GlmReference
