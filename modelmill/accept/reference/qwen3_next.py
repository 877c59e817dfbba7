"""qwen3_next, qwen3_5_text, qwen3_5_moe_text: Gated DeltaNet, gated attention, and experts."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.gated_delta_net import GatedDeltaNetMixin
from modelmill.accept.reference.moe import ExpertsMixin
from modelmill.accept.reference.plain_decoder import reference_factory_by_model_type
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class Qwen3NextReference(GatedDeltaNetMixin, ExpertsMixin):
    """Qwen3NextForCausalLM."""

    shared_path = "mlp.shared_expert"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.renormalizes = bool(config.get("norm_topk_prob", True))


class Qwen35Reference(GatedDeltaNetMixin):
    """Qwen3_5ForCausalLM: an MLP in the place of the experts."""

    rows_grouped_by_key_head = False

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, {"num_key_value_heads": 4} | config)


class Qwen35MoeReference(GatedDeltaNetMixin, ExpertsMixin):
    """Qwen3_5MoeForCausalLM."""

    rows_grouped_by_key_head = False
    shared_path = "mlp.shared_expert"


REFERENCE = reference_factory_by_model_type(
    {
        "qwen3_next": Qwen3NextReference,
        "qwen3_5_text": Qwen35Reference,
        "qwen3_5_moe_text": Qwen35MoeReference,
    }
)
