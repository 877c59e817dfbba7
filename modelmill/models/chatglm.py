"""ChatGLM2, ChatGLM3 and GLM-4 9B of before 2024-11 (``ChatGLMModel``): half of a head rotates.

``rope_ratio`` multiplies the rotation's base, as in ChatGLM3-32K and GLM-4.
"""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models._hf_config import (
    check_even_head_dim,
    checked_rotary_channels,
    exact_quotient,
    non_negative_float,
    num_layers,
    positive_float,
    positive_int,
    read_boolean,
    require_supported_value,
)
from modelmill.models._megatron_names import layer_checkpoint_names
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.norm import LAYER_NORM, RMS_NORM
from modelmill.nn.rotary import RopeSpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    names=layer_checkpoint_names(),
    layers="transformer.encoder.layers",
    embed="transformer.embedding.word_embeddings",
    norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
    neighbours=True,
    ignored=(r"(.*\.)?rotary_pos_emb\.inv_freq",),
)
SUPPORTED_VALUES = {
    "post_layer_norm": (True,), "original_rope": (True,), "interleaved_qkv": (False,),
    "pre_seq_len": (0,), "prefix_projection": (False,), "quantization_bit": (0,),
}  # fmt: skip
UNUSED_CONFIG_KEYS = (
    "apply_query_key_layer_scaling", "bias_dropout_fusion", "fp32_residual_connection",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in ChatGLMConfig."""
    require_supported_value(raw, "apply_residual_connection_post_layernorm", (False,), False)
    hidden, heads = positive_int(raw, "hidden_size"), positive_int(raw, "num_attention_heads")
    grouped = read_boolean(raw, "multi_query_attention", False)
    kv_heads = positive_int(raw, "multi_query_group_num", default=1)
    if grouped:
        exact_quotient("num_attention_heads", heads, "multi_query_group_num", kv_heads)
    dim = positive_int(raw, "kv_channels", default=hidden // heads)
    check_even_head_dim("kv_channels", dim, dim)
    length = positive_int(raw, "seq_length", default=2048)
    base = 1e4 * positive_float(raw, "rope_ratio", default=1.0)
    bias = read_boolean(raw, "add_bias_linear", False)
    layers = num_layers(raw, "num_layers")
    require_supported_value(raw, "num_hidden_layers", (layers, None), None)
    return DecoderConfig(
        hidden=hidden,
        inner=positive_int(raw, "ffn_hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads if grouped else heads,
        head_dim=dim,
        vocab=positive_int(raw, "padded_vocab_size", "vocab_size"),
        eps=non_negative_float(raw, "layernorm_epsilon", default=1e-5),
        max_len=length,
        rope=RopeSpec(checked_rotary_channels("kv_channels", dim, dim // 2), base, length),
        norm=RMS_NORM if read_boolean(raw, "rmsnorm", True) else LAYER_NORM,
        qkv_bias=read_boolean(raw, "add_qkv_bias", False) or bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=read_boolean(raw, "tie_word_embeddings", False),
    )
