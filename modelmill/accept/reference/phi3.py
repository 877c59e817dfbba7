"""phi3: fused matrices, LongRoPE (arXiv:2404.14219, arXiv:2402.13753)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.base import LayerWeights, ModuleWeights
from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.rope import partial_rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource


class Phi3Reference(PlainDecoderReference):
    """Phi3ForCausalLM."""

    DEFAULTS = ReferenceDefaults(eps=1e-5, positions=4096)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        trained = config.get("original_max_position_embeddings") or 4096
        settings = config | {"original_max_position_embeddings": trained}
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        # the names that older files have for it
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind in ("su", "yarn"):
            settings |= {"rope_scaling": {**scaling, "rope_type": "longrope"}}
        self.rope = partial_rope_from_config(settings, self.head_dim, self.max_position)
        self.windows = [config.get("sliding_window")] * self.num_layers

    def mixer_and_mlp_weights(self, index: int) -> LayerWeights:
        """Split the fused matrices: q, k, v by heads; gate above up."""
        stem = f"{self.LAYERS}.{index}"
        qkv = self.source.get(f"{stem}.self_attn.qkv_proj.weight")
        kv = self.num_kv_heads * self.head_dim
        q, k, v = qkv.split([self.num_heads * self.head_dim, kv, kv])
        gate, up = self.source.get(f"{stem}.mlp.gate_up_proj.weight").chunk(2)
        return {
            "q": ModuleWeights(q),
            "k": ModuleWeights(k),
            "v": ModuleWeights(v),
            "gate": ModuleWeights(gate),
            "up": ModuleWeights(up),
            "o_proj": self.read_linear(f"{stem}.self_attn.o_proj", False),
            "down": self.read_linear(f"{stem}.mlp.down_proj", False),
        }


REFERENCE = Phi3Reference
