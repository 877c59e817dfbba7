"""iquestcoder: grouped attention and a gated MLP (the model card of IQuest-Coder-V1)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.plain_decoder import PlainDecoderReference, ReferenceDefaults
from modelmill.accept.reference.tensor_source import TensorSource


class IQuestCoderReference(PlainDecoderReference):
    """IQuestCoderForCausalLM."""

    DEFAULTS = ReferenceDefaults(kv_heads=8, head_dim=128, eps=1e-5, positions=131072, theta=1e4)

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.biased = self.biased_attention_and_mlp_projections()


REFERENCE = IQuestCoderReference
