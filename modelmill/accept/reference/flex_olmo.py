"""flex_olmo: norms behind the branches, and over q and k; experts (arXiv:2507.07024)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.moe import ExpertsMixin
from modelmill.accept.reference.olmo2 import Olmo2Reference
from modelmill.accept.reference.rope import ReferenceRope, rope_from_config
from modelmill.accept.reference.tensor_source import TensorSource


class FlexOlmoReference(Olmo2Reference, ExpertsMixin):
    """FlexOlmoForCausalLM."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        config = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096} | config
        if config.get("rope_theta") is None:
            config["rope_theta"] = 500000.0
        super().__init__(source, config)
        self.renormalizes = bool(config.get("norm_topk_prob", False))

    def make_rope(self, config: dict[str, Any], length: int) -> ReferenceRope:
        """Return the rotation of whole heads."""
        return rope_from_config(config, self.head_dim, length)


REFERENCE = FlexOlmoReference
