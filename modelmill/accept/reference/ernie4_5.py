"""ernie4_5: neighbouring channels rotated (ERNIE 4.5 technical report)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class Ernie45Reference(PlainDecoderReference):
    """Ernie4_5ForCausalLM."""

    DEFAULTS = ReferenceDefaults(
        kv_heads=2, head_dim=128, eps=1e-5, positions=131072, tied=True, theta=500000.0
    )
    has_interleaved_rope = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.projections_with_bias("use_bias", self.projection_paths)


REFERENCE = Ernie45Reference
