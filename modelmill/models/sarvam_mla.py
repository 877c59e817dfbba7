"""Sarvam 105B (``SarvamMLAForCausalLM``): DeepSeek-V3's layers with queries of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import _deepseek_common, _sarvam_config
from modelmill.models._deepseek_common import SIGMOID_ROUTER_ALLOWED_VALUES, decoder_config
from modelmill.models._hf_config import read_boolean
from modelmill.models._moe_config import SELECTION_BIAS_PATTERNS, group_limited_router
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = _deepseek_common.CHECKPOINT_LAYOUT
# latent vectors have norms whatever use_qk_norm says, and no head has one
SUPPORTED_VALUES = {
    **_sarvam_config.SUPPORTED_VALUES,
    **SIGMOID_ROUTER_ALLOWED_VALUES,
    "use_qk_norm": (True, False),
}
# a query's size follows from others
UNUSED_CONFIG_KEYS = (
    *_deepseek_common.UNUSED_CONFIG_KEYS,
    *_sarvam_config.UNUSED_CONFIG_KEYS,
    "q_head_dim",
)
CONFIG_DEFAULTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS
DEEPSEEK_YARN = "deepseek_yarn"


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in SarvamMLAConfig."""
    raw = with_config_defaults(_with_standard_yarn_name(raw), {"q_lora_rank": None})
    raw = _sarvam_config.with_expert_counts(raw, 128)
    return decoder_config(
        raw,
        group_limited_router(raw, RouterConfig(128, 8, scale=2.5)),
        positions=4096,
        neighbours=read_boolean(raw, "rope_interleave", True),
        defaults=CONFIG_DEFAULTS,
    )


def _with_standard_yarn_name(raw: RawConfig) -> RawConfig:
    """The config with YaRN under its usual name; published files call it deepseek_yarn."""
    scaling: Any = raw.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return raw
    if DEEPSEEK_YARN not in (scaling.get("type"), scaling.get("rope_type")):
        return raw
    plain = {key: value for key, value in scaling.items() if key != "type"}
    return with_config_overrides(raw, {"rope_scaling": {**plain, "rope_type": "yarn"}})
