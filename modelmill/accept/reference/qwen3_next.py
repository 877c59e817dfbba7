"""qwen3_next: Gated DeltaNet and gated attention, with experts and a shared one."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.gated_delta_net import GatedDeltaNetMixin
from modelmill.accept.reference.moe import ExpertsMixin
from modelmill.accept.reference.tensor_source import TensorSource

MODEL_TYPES = ("qwen3_next",)
NAME_PREFIX = "model."


class Qwen3NextReference(GatedDeltaNetMixin, ExpertsMixin):
    """Qwen3NextForCausalLM."""

    shared_path = "mlp.shared_expert"

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        super().__init__(source, config)
        self.renormalizes = bool(config.get("norm_topk_prob", True))


REFERENCE = Qwen3NextReference
