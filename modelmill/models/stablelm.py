"""StableLM 2 and 3B: LayerNorm, a quarter of each head rotated; some with parallel layers."""

from __future__ import annotations

from modelmill.checkpoint.rename import Rule
from modelmill.core.config_view import RawConfig, overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import boolean, head_dim_override, non_negative_float, positive_int
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_layer import ParallelLayer
from modelmill.nn.pre_norm import PreNormLayer
from modelmill.nn.qkv_norm import HEAD_LAYER_NORM, QKNormConfig

Model = Decoder
LAYOUT = _llama_common.LAYOUT


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in StableLmConfig."""
    eps = non_negative_float(raw, "layer_norm_eps", default=1e-5)
    normed, parallel = boolean(raw, "qk_layernorm", False), "use_parallel_residual"
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    raw = overlay_config(raw, {"num_key_value_heads": 32}, head_dim_override(raw, hidden, heads))
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=4096, activation="silu"),
        layer_norm="layer_norm_eps",
        partial=0.25,
        layer=ParallelLayer if boolean(raw, parallel, False) else PreNormLayer,
        qkv_bias=boolean(raw, "use_qkv_bias", False),
        qkv_norm=QKNormConfig(HEAD_LAYER_NORM, eps) if normed else None,
    )


def rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; the norms of q and k are one tensor for each head."""
    heads = ("q", config.heads), ("k", config.kv_heads)
    norms = tuple(
        f"self_attn.{part}_layernorm.norms.{i}" for part, count in heads for i in range(count)
    )
    return CheckpointLayout({**CHECKPOINT_NAMES, "attn.qkv_norm": norms}).rules(config)
