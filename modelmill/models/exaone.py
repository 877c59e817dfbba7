"""EXAONE 3, 3.5 and Deep (``ExaoneForCausalLM``): LLaMA under GPT-2's names of tensors."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_and_mlp_bias_fields,
    first_set_key,
    non_negative_float,
    num_layers,
    read_activation,
    require_consistent_alias_value,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import IGNORED_BUFFERS, CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        "attn_norm": ("ln_1",),
        "attn.qkv_proj": tuple(f"attn.attention.{part}_proj" for part in "qkv"),
        "attn.o_proj": ("attn.attention.out_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.gate_up_proj": ("mlp.c_fc_0", "mlp.c_fc_1"),
        "mlp.down_proj": ("mlp.c_proj",),
    },
    layers="transformer.h",
    embed="transformer.wte",
    norm="transformer.ln_f",
    ignored=(*IGNORED_BUFFERS, r"(.*\.)?rotary\.inv_freq"),
)
UNUSED_CONFIG_KEYS = ("embed_dropout",)
ACTIVATION_KEYS = ("activation_function", "hidden_act")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json, where three keys have two names; defaults as in ExaoneConfig."""
    renamed = {
        "num_hidden_layers": num_layers(raw, "num_layers", "num_hidden_layers"),
        "rms_norm_eps": non_negative_float(raw, "layer_norm_epsilon", "rms_norm_eps", default=1e-5),
    }
    require_consistent_alias_value(raw, ACTIVATION_KEYS, "silu")
    config = _llama_common.config_from_hf(
        with_config_overrides(raw, renamed),
        ConfigDefaults(kv_heads=8, positions=4096, theta=500000.0),
        activation=read_activation(raw, first_set_key(raw, ACTIVATION_KEYS), "silu"),
        **attention_and_mlp_bias_fields(raw),
    )
    return _llama_common.refuse_sliding_windows(raw, config)
