"""MPT: ALiBi, q, k and v clipped in some, LayerNorm without bias; no linear layer has one.

The largest exponent of the slopes is the config's, as in the code it was published with and in
llama.cpp; transformers takes 8 for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.config_view import ConfigView
from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import optional_cap, positive_float, positive_int, require_value
from modelmill.models._layer_rules import CheckpointLayout
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM_WITHOUT_BIAS

CHECKPOINT_PREFIXES = _gpt2_common.CHECKPOINT_PREFIXES
LAYOUT = CheckpointLayout(
    names={
        "attn_norm": ("norm_1",),
        "attn.qkv_proj": ("attn.Wqkv",),
        "attn.o_proj": ("attn.out_proj",),
        "mlp_norm": ("norm_2",),
        "mlp.fc_proj": ("ffn.up_proj",),
        "mlp.down_proj": ("ffn.down_proj",),
    },
    layers="transformer.blocks",
    embed="transformer.wte",
    norm="transformer.norm_f",
)
rules, ignored_tensors = LAYOUT.rules, LAYOUT.ignored_tensors
SUPPORTED_VALUES = {
    "expansion_ratio": (4,), "logit_scale": (), "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}  # fmt: skip
# with ALiBi there are no learned positions; embedding_fraction scales gradients alone
UNUSED_CONFIG_KEYS = (
    "learned_pos_emb", "embedding_fraction", "emb_pdrop", "init_config", "init_device", "verbose",
    "auto_map", "tokenizer_name",
)  # fmt: skip
# of attn_config: how attention is computed, not what
_UNREAD_ATTENTION_KEYS = ("attn_impl", "attn_pdrop", "softmax_scale", "clip_qkv", "alibi_bias_max")
_ATTENTION_VALUES = {
    "alibi": True, "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False,
    "attn_type": "multihead_attention",
}  # fmt: skip


def config_from_hf(raw: Mapping[str, Any]) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MptConfig."""
    attention = _attention_keys(raw)
    scale = attention.get("softmax_scale")
    return _gpt2_common.config_from_hf(
        raw,
        norm=LAYER_NORM_WITHOUT_BIAS,
        activation="gelu",
        hidden=("d_model", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        layers=("n_layers", "num_hidden_layers"),
        max_len=positive_int(raw, "max_seq_len", default=2048),
        alibi=AlibiConfig(positive_float(attention, "alibi_bias_max", default=8.0)),
        qkv_clip=optional_cap(attention, "clip_qkv"),
        attention_scale=None if scale is None else positive_float(attention, "softmax_scale"),
    )


def _attention_keys(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object ``attn_config``, its switches checked."""
    value = raw.get("attn_config")
    value = {} if value is None else value
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: attn_config must be an object, not {quote(value, 60)}")
    for key, supported in _ATTENTION_VALUES.items():
        if value.get(key, supported) != supported:
            require_value({f"attn_config.{key}": value[key]}, f"attn_config.{key}", (supported,), 0)
    known = {*_ATTENTION_VALUES, *_UNREAD_ATTENTION_KEYS, "model_type"}
    if isinstance(raw, ConfigView):
        raw.ignore({f"attn_config.{k}": each for k, each in value.items() if k not in known})
    return value


class Model(Decoder):
    """The decoder with ALiBi."""
