"""Falcon 7B, 40B, 180B, Falcon 2 and Falcon-RW: few KV heads, q, k and v in one matrix.

Falcon-RW has ALiBi in the place of the rotation; its bias is scaled as the scores are. transformers
rounds it to bfloat16, here it is exact.
"""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _hf_config, _llama_common, bloom
from modelmill.models._hf_config import MAX_CONFIG_INTEGER, positive_int, read_boolean
from modelmill.models._llama_common import ConfigDefaults
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer
from modelmill.nn.pre_norm import PreNormLayer

Model = Decoder
CHECKPOINT_LAYOUT = bloom.CHECKPOINT_LAYOUT
TWO_NORM_NAMES = {**CHECKPOINT_LAYOUT.names, "attn_norm": ("ln_attn",), "mlp_norm": ("ln_mlp",)}
UNUSED_CONFIG_KEYS = ("apply_residual_connection_post_layernorm",)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in FalconConfig."""
    new = read_boolean(raw, "new_decoder_architecture", False)
    parallel = read_boolean(raw, "parallel_attn", True)
    heads = positive_int(raw, "num_attention_heads", "n_head")
    hidden = positive_int(raw, "n_embed", "hidden_size")
    stored = positive_int(raw, "num_kv_heads", "n_head_kv", default=heads)
    one_head = read_boolean(raw, "multi_query", True) and not new
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": positive_int(raw, "num_hidden_layers", "n_layer"),
        "num_key_value_heads": 1 if one_head else stored if new else heads,
        "intermediate_size": positive_int(raw, "ffn_hidden_size", default=4 * hidden),
        **_hf_config.checked_default_head_dim_override(raw, hidden, heads),
    }
    config = _llama_common.config_from_hf(
        with_config_overrides(raw, sizes),
        ConfigDefaults(tied=True),
        layer_norm="layer_norm_epsilon",
        activation=_hf_config.read_activation(raw, "activation", "gelu"),
        layer=ParallelResidualLayer if parallel else PreNormLayer,
        mlp_norm=_has_two_norms(raw, new, parallel),
        gated=False,
        **_hf_config.linear_bias_fields(raw, "bias", False),
    )
    if not read_boolean(raw, "alibi", False):
        return config
    alibi = AlibiConfig(scale=config.head_dim**-0.5)
    return replace(config, rope=None, alibi=alibi, max_extended_len=MAX_CONFIG_INTEGER)


def _has_two_norms(raw: RawConfig, new: bool, parallel: bool) -> bool:
    """Whether a parallel layer has a norm for each branch."""
    count = positive_int(raw, "num_ln_in_parallel_attn", default=2 if new else 1, max_value=2)
    if (count == 2 and not new) or (new and not parallel):
        raise CheckpointError(
            f"config.json: num_ln_in_parallel_attn={count} and parallel_attn={parallel} do not "
            f"go with new_decoder_architecture={new}"
        )
    return count == 2


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; a parallel layer with two norms has other names for them."""
    if config.layer is ParallelResidualLayer and config.mlp_norm:
        return replace(CHECKPOINT_LAYOUT, names=TWO_NORM_NAMES).rename_rules(config)
    return CHECKPOINT_LAYOUT.rename_rules(config)
