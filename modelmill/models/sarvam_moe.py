"""Sarvam 30B (``SarvamMoEForCausalLM``): GLM-4.5's layers, whose heads rotate whole."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _moe_config, _sarvam_config, glm4_moe
from modelmill.models._hf_config import first_set_key, read_boolean, require_consistent_alias_value
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._rename_rules import SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = replace(
    _moe_config.SHARED_EXPERTS_LAYOUT,
    names={
        **_moe_config.SHARED_EXPERTS_LAYOUT.names,
        "attn.qkv_proj": ("attention.query_key_value",),
        "attn.rope_cache.q_norm": ("attention.query_layernorm",),
        "attn.rope_cache.k_norm": ("attention.key_layernorm",),
        "attn.o_proj": ("attention.dense",),
    },
    embed="model.word_embeddings",
    tensors={"mlp.routing.selection_bias": SourceTensors(("mlp.gate.expert_bias",))},
    has_draft_layer=True,
)
SUPPORTED_VALUES = _sarvam_config.SUPPORTED_VALUES
UNUSED_CONFIG_KEYS = _sarvam_config.UNUSED_CONFIG_KEYS
FLOAT32_TENSORS = _moe_config.SELECTION_BIAS_PATTERNS
BIAS_KEYS = ("use_qkv_bias", "attention_bias")
CONFIG_DEFAULTS = ConfigDefaults(kv_heads=4, head_dim=64, positions=131072, theta=8_000_000.0)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in SarvamMoEConfig."""
    require_consistent_alias_value(raw, BIAS_KEYS, False)
    bias = read_boolean(raw, first_set_key(raw, BIAS_KEYS), False)
    raw = _sarvam_config.with_expert_counts(raw, 128)
    return glm4_moe.decoder_config(
        with_config_defaults(raw, {"use_qk_norm": True}, overrides={"attention_bias": bias}),
        CONFIG_DEFAULTS,
        RouterConfig(128, 6, scale=2.5),
        inner=1024,
        partial=1.0,
    )
