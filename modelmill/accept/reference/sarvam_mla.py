"""sarvam_mla: latent attention and experts as in DeepSeek-V3 (the card of Sarvam 105B)."""

from __future__ import annotations

from typing import Any

from modelmill.accept.reference.deepseek import DeepseekReference
from modelmill.accept.reference.sarvam_moe import with_config_class_keys
from modelmill.accept.reference.tensor_source import TensorSource

DEFAULT_SIZES = {
    "q_lora_rank": None, "n_routed_experts": 128, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


class SarvamMLAReference(DeepseekReference):
    """SarvamMLAForCausalLM; its deepseek_yarn is YaRN."""

    def __init__(self, source: TensorSource, config: dict[str, Any]) -> None:
        named, scaling = with_config_class_keys(config), config.get("rope_scaling") or {}
        if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
            named["rope_scaling"] = {**scaling, "type": "yarn", "rope_type": "yarn"}
        super().__init__(source, DEFAULT_SIZES | named)


REFERENCE = SarvamMLAReference
