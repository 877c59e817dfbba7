"""ernie4_5: neighbouring channels rotated (ERNIE 4.5 technical report)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference
from modelmill.accept.reference.rope import partial_rope
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("ernie4_5",)
NAME_PREFIX = "model."


class Ernie45Reference(PlainDecoderReference):
    """Ernie4_5ForCausalLM."""

    TIED_BY_DEFAULT = True

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.num_kv_heads = int(config.get("num_key_value_heads") or 2)
        self.head_dim = int(config.get("head_dim") or 128)
        self.score_scale = self.head_dim**-0.5
        self.eps = float(config.get("rms_norm_eps", 1e-5))
        length = int(config.get("max_position_embeddings") or 131072)
        self.rope = partial_rope(config, self.head_dim, length, theta=500000.0)
        self.turns_neighbours = True
        if config.get("use_bias"):
            self.biased = frozenset(self.projection_paths)


REFERENCE = Ernie45Reference
