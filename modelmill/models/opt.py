"""OPT, the models with norms in front of the branches (all but 350M): learned positions, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models._hf_config import (
    activation,
    boolean,
    head_size,
    num_layers,
    positive_int,
    require_value,
)
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM

CHECKPOINT_PREFIXES = ("model.",)
CHECKPOINT_NAMES = {
    "attn_norm": ("self_attn_layer_norm",),
    "attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o_proj": ("self_attn.out_proj",),
    "mlp_norm": ("final_layer_norm",),
    "mlp.fc_proj": ("fc1",),
    "mlp.down_proj": ("fc2",),
}
LAYOUT = CheckpointLayout(
    CHECKPOINT_NAMES,
    layers="model.decoder.layers",
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    norm="model.decoder.final_layer_norm",
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors
UNUSED_CONFIG_KEYS = ("init_std", "activation_dropout")


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in OPTConfig."""
    for key, value in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        require_value(raw, key, (value,), value)
    require_value(raw, "layer_norm_elementwise_affine", (True,), True)
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    require_value(raw, "word_embed_proj_dim", (hidden, None), None)
    bias = boolean(raw, "enable_bias", True)
    return DecoderConfig(
        hidden=hidden,
        inner=positive_int(raw, "ffn_dim", default=3072),
        layers=num_layers(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(hidden, heads),
        vocab=positive_int(raw, "vocab_size"),
        eps=1e-5,
        max_len=positive_int(raw, "max_position_embeddings", default=2048),
        rope=None,
        first_position_row=2,
        norm=LAYER_NORM,
        gated=False,
        activation=activation(raw, "activation_function", "relu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=boolean(raw, "tie_word_embeddings", True),
    )


class Model(Decoder):
    """The decoder with learned positions."""
