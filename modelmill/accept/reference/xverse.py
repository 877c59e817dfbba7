"""xverse: LLaMA under another name (XVERSE-13B's model card)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("xverse",)
NAME_PREFIX = "model."


class XverseReference(PlainDecoderReference):
    """XverseForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        length = int(config.get("max_position_embeddings") or 8192)
        self.rope = rope_from_config(config, self.head_dim, length)


REFERENCE = XverseReference
