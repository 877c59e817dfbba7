"""GPT-J: attention and MLP side by side behind one norm, neighbouring channels rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models._hf_config import (
    activation,
    boolean,
    check_pairs,
    head_size,
    non_negative_float,
    num_layers,
    positive_int,
)
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM
from modelmill.nn.parallel_layer import ParallelLayer
from modelmill.nn.rotary import RopeSpec

CHECKPOINT_PREFIXES = ("transformer.",)
CHECKPOINT_NAMES = {
    "attn_norm": ("ln_1",),
    "attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.o_proj": ("attn.out_proj",),
    "mlp.fc_proj": ("mlp.fc_in",),
    "mlp.down_proj": ("mlp.fc_out",),
}
LAYOUT = CheckpointLayout(
    CHECKPOINT_NAMES,
    layers="transformer.h",
    embed="transformer.wte",
    norm="transformer.ln_f",
    neighbours=True,
    ignored=(r".*\.attn\.(masked_)?bias",),
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors
SUPPORTED_VALUES = {"rotary": (True,), "scale_attn_weights": (True,)}


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GPTJConfig."""
    hidden = positive_int(raw, "n_embd", "hidden_size")
    heads = positive_int(raw, "n_head", "num_attention_heads")
    positions = positive_int(raw, "n_positions", "max_position_embeddings", default=2048)
    dim = head_size(hidden, heads)
    rotated = positive_int(raw, "rotary_dim", default=64, max_value=dim)
    return DecoderConfig(
        hidden=hidden,
        inner=positive_int(raw, "n_inner", default=4 * hidden),
        layers=num_layers(raw, "n_layer", "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        vocab=positive_int(raw, "vocab_size"),
        eps=non_negative_float(raw, "layer_norm_epsilon", default=1e-5),
        max_len=positions,
        rope=RopeSpec(check_pairs("rotary_dim", rotated, rotated), 1e4, positions),
        norm=LAYER_NORM,
        layer=ParallelLayer,
        gated=False,
        activation=activation(raw, "activation_function", "gelu_new"),
        mlp_bias=True,
        head_bias=True,
        tied=boolean(raw, "tie_word_embeddings", False),
    )


class Model(Decoder):
    """The decoder with parallel layers."""
