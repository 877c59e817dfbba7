"""BLOOM: ALiBi, a norm behind the embedding, q, k and v in one matrix (arXiv:2211.05100)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.models._hf_config import (
    MAX_SIZE,
    boolean,
    head_size,
    non_negative_float,
    num_layers,
    positive_int,
)
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM

CHECKPOINT_PREFIXES = ("transformer.",)
CHECKPOINT_NAMES = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv_proj": ("self_attention.query_key_value",),
    "attn.o_proj": ("self_attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.fc_proj": ("mlp.dense_h_to_4h",),
    "mlp.down_proj": ("mlp.dense_4h_to_h",),
}
LAYOUT = CheckpointLayout(
    CHECKPOINT_NAMES,
    layers="transformer.h",
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    grouped_qkv=True,
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors
SUPPORTED_VALUES = {"apply_residual_connection_post_layernorm": (False,)}
# slow_but_exact adds the same products in the training ranks' order; the rest is of training
UNUSED_CONFIG_KEYS = (
    "slow_but_exact", "masked_softmax_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion",
    "offset_alibi", "skip_bias_add", "skip_bias_add_qkv",
)  # fmt: skip


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in BloomConfig."""
    hidden = positive_int(raw, "hidden_size", "n_embed")
    heads = positive_int(raw, "num_attention_heads", "n_head")
    return DecoderConfig(
        hidden=hidden,
        inner=4 * hidden,
        layers=num_layers(raw, "num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(hidden, heads),
        vocab=positive_int(raw, "vocab_size"),
        eps=non_negative_float(raw, "layer_norm_epsilon", default=1e-5),
        max_len=positive_int(raw, "seq_length", default=2048),
        max_extended_len=MAX_SIZE,
        rope=None,
        alibi=AlibiConfig(),
        embedding_norm=True,
        norm=LAYER_NORM,
        gated=False,
        activation="gelu_tanh",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=boolean(raw, "tie_word_embeddings", True),
    )


class Model(Decoder):
    """The decoder with ALiBi."""
