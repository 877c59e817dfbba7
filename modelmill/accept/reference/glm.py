"""glm and glm4: half of each head rotated by neighbouring channels (arXiv:2406.12793)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import Affine, LayerWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("glm", "glm4")
NAME_PREFIX = "model."


class GlmReference(PlainDecoderReference):
    """GlmForCausalLM; Glm4ForCausalLM has a norm behind each branch, too."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_kv_heads = int(config.get("num_key_value_heads", 2))
        self.head_dim = int(config.get("head_dim", 128))
        self.score_scale = self.head_dim**-0.5
        self.eps = float(config.get("rms_norm_eps", 1.5625e-07))
        length = int(config.get("max_position_embeddings") or 131072)
        self.rope = partial_rope(config, self.head_dim, length, factor=0.5)
        self.turns_neighbours = True
        if config.get("attention_bias", True):
            self.biased = frozenset("qkv")
        if config["model_type"] == "glm4":
            self.layer = self.sandwich
            self.norm_paths |= {
                "attn_post": "post_self_attn_layernorm",
                "mlp_post": "post_mlp_layernorm",
            }

    def projections(self, index: int) -> LayerWeights:
        """Split the MLP's fused matrix: gate above up."""
        stem = f"{self.LAYERS}.{index}"
        gate, up = self.source.get(f"{stem}.mlp.gate_up_proj.weight").chunk(2)
        fused = {"gate": Affine(gate), "up": Affine(up)}
        return fused | {
            name: self.read_affine(f"{stem}.{path}", name in self.biased)
            for name, path in self.projection_paths.items()
            if name not in fused
        }


REFERENCE = GlmReference
