"""OLMo 1 (``OlmoForCausalLM``): LLaMA with LayerNorm without weights, some with q, k, v clipped."""

from __future__ import annotations

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, optional_positive_float
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._rename_rules import rename_rules_with_all_ones_norms
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM_WITHOUT_BIAS

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = ("rms_norm_eps",)  # of LLaMA's class, from which files of 2024 come


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in OlmoConfig."""
    return _llama_common.config_from_hf(
        with_config_overrides(raw, {"rms_norm_eps": 1e-5}),
        ConfigDefaults(activation="silu"),
        norm=LAYER_NORM_WITHOUT_BIAS,
        qkv_clip=optional_positive_float(raw, "clip_qkv"),
        **attention_bias_fields(raw),
    )


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; norms have no weights."""
    return rename_rules_with_all_ones_norms(CHECKPOINT_LAYOUT, config, "self_attn.o_proj")
