"""Apertus: norms of queries and keys, an MLP of two matrices, an activation with learned slopes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, read_activation
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.xielu import XIELU

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        "attn_norm": ("attention_layernorm",),
        "mlp_norm": ("feedforward_layernorm",),
        "mlp.fc_proj": ("mlp.up_proj",),
        "mlp.act": ("mlp.act_fn",),
    }
)
FLOAT32_TENSORS = (r"layers\.\d+\.mlp\.act\..*",)
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {"qk_norm": (True,), "post_norm": (False,)}
DEFAULT_ROPE_THETA = 12000000.0
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3", "rope_theta": DEFAULT_ROPE_THETA, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in ApertusConfig."""
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = with_config_overrides(raw, {"rope_parameters": DEFAULT_ROPE})
    is_xielu = raw.get("hidden_act", XIELU.NAME) == XIELU.NAME
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=65536, eps=1e-5, theta=DEFAULT_ROPE_THETA),
        gated=False,
        activation=XIELU.NAME if is_xielu else read_activation(raw, "hidden_act", "silu"),
        **attention_bias_fields(raw),
        qk_norm=True,
    )
