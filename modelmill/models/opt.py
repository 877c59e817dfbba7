"""OPT, the models with norms in front of the branches (all but 350M): learned positions, ReLU."""

from __future__ import annotations

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import (
    linear_bias_fields,
    positive_int,
    read_activation,
    read_boolean,
    require_supported_value,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._rename_rules import CheckpointLayout, rename_rules_with_all_ones_norms
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM, LAYER_NORM_WITHOUT_BIAS

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    layers="model.decoder.layers",
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
    names={
        **CHECKPOINT_NAMES,
        "attn_norm": ("self_attn_layer_norm",),
        "attn.o_proj": ("self_attn.out_proj",),
        "mlp_norm": ("final_layer_norm",),
        "mlp.fc_proj": ("fc1",),
        "mlp.down_proj": ("fc2",),
    },
)
SUPPORTED_VALUES = {"learned_embeddings": (True,), "scale_embeddings": (False,)}  # Galactica's
UNUSED_CONFIG_KEYS = ("init_std", "activation_dropout")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in OPTConfig."""
    for key, value in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        require_supported_value(raw, key, (value,), value)
    affine = read_boolean(raw, "layer_norm_elementwise_affine", True)
    config = _gpt2_common.config_from_hf(
        with_config_overrides(raw, {"ffn_dim": positive_int(raw, "ffn_dim", default=3072)}),
        hidden=("hidden_size",),
        heads=("num_attention_heads",),
        layers=("num_hidden_layers",),
        inner=("ffn_dim",),
        eps=1e-5,
        max_len=positive_int(raw, "max_position_embeddings", default=2048),
        first_position_row=2,
        norm=LAYER_NORM if affine else LAYER_NORM_WITHOUT_BIAS,
        activation=read_activation(raw, "activation_function", "relu"),
        **linear_bias_fields(raw, "enable_bias", True),
    )
    require_supported_value(raw, "word_embed_proj_dim", (config.hidden, None), None)
    return config


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; norms may have no weights."""
    if config.norm == LAYER_NORM:
        return CHECKPOINT_LAYOUT.rename_rules(config)
    return rename_rules_with_all_ones_norms(CHECKPOINT_LAYOUT, config, "self_attn.out_proj")
