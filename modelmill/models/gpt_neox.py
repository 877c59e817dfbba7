"""GPT-NeoX and Pythia: attention and MLP side by side, a quarter of each head rotated."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    attention_bias_fields,
    checked_default_head_dim_override,
    positive_int,
    read_boolean,
)
from modelmill.models._llama_common import ConfigDefaults
from modelmill.models._megatron_names import layer_checkpoint_names
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer
from modelmill.nn.pre_norm import PreNormLayer

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    layers="gpt_neox.layers",
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    names=layer_checkpoint_names(attention="attention"),
    grouped_qkv=True,
    ignored=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; its own names of the rotation's base and share are read, too."""
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    sizes = {**checked_default_head_dim_override(raw, hidden, heads), "num_key_value_heads": None}
    raw = with_config_overrides(raw, sizes)
    parallel = read_boolean(raw, "use_parallel_residual", True)
    return _llama_common.config_from_hf(
        raw,
        ConfigDefaults(activation="gelu"),
        layer_norm="layer_norm_eps",
        partial=0.25,
        rope_options={"theta_key": "rotary_emb_base", "partial_key": "rotary_pct"},
        layer=ParallelResidualLayer if parallel else PreNormLayer,
        mlp_norm=True,
        gated=False,
        **attention_bias_fields(raw, default=True),
        mlp_bias=True,
    )
