"""internlm2: LLaMA with q, k and v in one matrix, by KV head (arXiv:2403.17297)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class InternLM2Reference(PlainDecoderReference):
    """InternLM2ForCausalLM."""

    DEFAULTS = ReferenceDefaults(theta=10000.0)
    EMBEDDING = "model.tok_embeddings.weight"
    HEAD = "output.weight"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.norm_paths = {"input_norm": "attention_norm", "mlp_norm": "ffn_norm"}
        mlp = {"gate": "w1", "up": "w3", "down": "w2"}
        self.projection_paths = {"qkv": "attention.wqkv", "o_proj": "attention.wo"} | {
            name: f"feed_forward.{path}" for name, path in mlp.items()
        }
        self.biased = self.projections_with_bias("bias", ("qkv", "o_proj"), default=True)


REFERENCE = InternLM2Reference
