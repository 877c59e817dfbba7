"""StableLM 2 and 3B: LayerNorm, a quarter of each head rotated; some with parallel layers."""

from __future__ import annotations

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    checked_default_head_dim_override,
    non_negative_float,
    positive_int,
    read_boolean,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.qkv_norm import PER_HEAD_LAYER_NORM, QKNormConfig

Model = Decoder
CHECKPOINT_LAYOUT = _llama_common.CHECKPOINT_LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in StableLmConfig."""
    eps = non_negative_float(raw, "layer_norm_eps", default=1e-5)
    normed, parallel = read_boolean(raw, "qk_layernorm", False), "use_parallel_residual"
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    raw = with_config_defaults(
        raw,
        {"num_key_value_heads": 32},
        overrides=checked_default_head_dim_override(raw, hidden, heads),
    )
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, activation="silu"),
        layer_norm="layer_norm_eps",
        partial=0.25,
        layer=ParallelResidualLayer if read_boolean(raw, parallel, False) else PreNormLayer,
        qkv_bias=read_boolean(raw, "use_qkv_bias", False),
        qkv_norm=QKNormConfig(PER_HEAD_LAYER_NORM, eps) if normed else None,
    )


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; the norms of q and k are one tensor for each head."""
    heads = ("q", config.heads), ("k", config.kv_heads)
    norms = tuple(
        f"self_attn.{part}_layernorm.norms.{i}" for part, count in heads for i in range(count)
    )
    return CheckpointLayout({**CHECKPOINT_NAMES, "attn.qkv_norm": norms}).rename_rules(config)
