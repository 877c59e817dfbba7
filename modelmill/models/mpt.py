"""MPT: ALiBi, q, k and v clipped in some, LayerNorm without bias; no linear layer has one.

The slopes' largest exponent is the config's, as in llama.cpp; transformers takes 8 for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.read_tracking_config import RawConfig, ReadTrackingConfig
from modelmill.models import _gpt2_common, _hf_config
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM_WITHOUT_BIAS

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
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
SUPPORTED_VALUES = {
    "expansion_ratio": (4,), "logit_scale": (), "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}  # fmt: skip
# with ALiBi there are no learned positions; embedding_fraction scales gradients alone
UNUSED_CONFIG_KEYS = (
    "learned_pos_emb", "embedding_fraction", "emb_pdrop", "init_config", "init_device", "verbose",
    "tokenizer_name",
)  # fmt: skip
# of attn_config: how attention is computed, not what
_FREE_ATTN_CONFIG_KEYS = ("attn_impl", "attn_pdrop", "softmax_scale", "clip_qkv", "alibi_bias_max")
_REQUIRED_ATTN_CONFIG_VALUES = {
    "alibi": True, "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False,
    "attn_type": "multihead_attention",
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MptConfig."""
    attention = _checked_attn_config(raw)
    return _gpt2_common.config_from_hf(
        raw,
        norm=LAYER_NORM_WITHOUT_BIAS,
        activation="gelu",
        hidden=("d_model", "hidden_size"),
        heads=("n_heads", "num_attention_heads"),
        layers=("n_layers", "num_hidden_layers"),
        max_len=_hf_config.positive_int(raw, "max_seq_len", default=2048),
        alibi=AlibiConfig(_hf_config.positive_float(attention, "alibi_bias_max", default=8.0)),
        qkv_clip=_hf_config.optional_positive_float(attention, "clip_qkv"),
        attention_scale=_hf_config.optional_positive_float(attention, "softmax_scale"),
    )


def _checked_attn_config(raw: RawConfig) -> Mapping[str, Any]:
    """The object ``attn_config``, its switches checked."""
    value = _hf_config.config_object("attn_config", raw.get("attn_config"))
    named = {f"attn_config.{key}": each for key, each in value.items()}
    for key, supported in _REQUIRED_ATTN_CONFIG_VALUES.items():
        _hf_config.require_supported_value(named, f"attn_config.{key}", (supported,), supported)
    known = {*_REQUIRED_ATTN_CONFIG_VALUES, *_FREE_ATTN_CONFIG_KEYS, "model_type"}
    if isinstance(raw, ReadTrackingConfig):
        raw.mark_unread({f"attn_config.{k}": each for k, each in value.items() if k not in known})
    return value
