"""xverse: LLaMA under another name (XVERSE-13B's model card)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import Defaults, PlainDecoderReference
from modelmill.accept.reference.tensor_source import TensorSource


class XverseReference(PlainDecoderReference):
    """XverseForCausalLM."""

    DEFAULTS = Defaults(positions=8192)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.rope = self.build_rope()


REFERENCE = XverseReference
