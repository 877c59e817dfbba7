"""GPT-NeoX and Pythia: attention and MLP side by side, a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import overlay_config
from modelmill.models import _llama_common
from modelmill.models._hf_config import activation, boolean
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM
from modelmill.nn.parallel_layer import ParallelLayer
from modelmill.nn.pre_norm import PreNormLayer

CHECKPOINT_PREFIXES = ("gpt_neox.",)
CHECKPOINT_NAMES = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv_proj": ("attention.query_key_value",),
    "attn.o_proj": ("attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.fc_proj": ("mlp.dense_h_to_4h",),
    "mlp.down_proj": ("mlp.dense_4h_to_h",),
}
LAYOUT = CheckpointLayout(
    CHECKPOINT_NAMES,
    layers="gpt_neox.layers",
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    grouped_qkv=True,
    ignored=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; its own names of the rotation's base and share are read, too."""
    raw = overlay_config(raw, {}, {"head_dim": None, "num_key_value_heads": None})
    bias = boolean(raw, "attention_bias", True)
    parallel = boolean(raw, "use_parallel_residual", True)
    return _llama_common.config_from_hf(
        raw,
        eps_key="layer_norm_eps",
        eps=1e-5,
        partial=0.25,
        rope_options={"theta_key": "rotary_emb_base", "partial_key": "rotary_pct"},
        activation=activation(raw, "hidden_act", "gelu"),
        norm=LAYER_NORM,
        layer=ParallelLayer if parallel else PreNormLayer,
        mlp_norm=True,
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
    )


class Model(Decoder):
    """The decoder with parallel layers."""
