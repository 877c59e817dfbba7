"""Qwen3-MoE: Qwen3 with many small experts (arXiv:2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, positive_int, read_boolean
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import EXPERT_NAMES, dense_layers, norm_topk_router
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout({**CHECKPOINT_NAMES, **EXPERT_NAMES})
SUPPORTED_VALUES = {
    "use_qk_norm": (True,), "qkv_bias": (False,), "shared_expert_intermediate_size": (0,),
}  # fmt: skip
UNUSED_CONFIG_KEYS = ("max_window_layers",)  # a window holds in every layer


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Qwen3MoeConfig."""
    windowed = read_boolean(raw, "use_sliding_window", False)
    raw = with_config_defaults(raw, {"num_key_value_heads": 4, "sliding_window": 4096})
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=32768, activation="silu"),
        **attention_bias_fields(raw),
        qk_norm=True,
    )
    router = norm_topk_router(raw, experts=128, top_k=8, renormalize=False)
    inner = positive_int(raw, "moe_intermediate_size", default=768)
    config = replace(
        config,
        moe=MoESpec(router, MLPSpec(config.hidden, inner, activation=config.activation)),
        dense_layers=dense_layers(raw, config.layers),
    )
    size = raw["sliding_window"]
    return (
        _llama_common.with_sliding_window(raw, config) if windowed and size is not None else config
    )
