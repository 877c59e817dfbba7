"""BLOOM: ALiBi, a norm behind the embedding, q, k and v in one matrix (arXiv:2211.05100)."""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import ALL_BIASES_ENABLED, positive_int, require_supported_value
from modelmill.models._megatron_names import layer_checkpoint_names
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.alibi import AlibiConfig
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    layers="transformer.h",
    embed="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    names=layer_checkpoint_names(),
    grouped_qkv=True,
)
SUPPORTED_VALUES = {"apply_residual_connection_post_layernorm": (False,)}
# without training ranks slow_but_exact has no effect; the rest is of training
UNUSED_CONFIG_KEYS = (
    "slow_but_exact", "masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi",
    "skip_bias_add", "skip_bias_add_qkv",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in BloomConfig.

    Where there were training ranks, ``slow_but_exact`` also leaves out two biases in transformers.
    """
    if raw.get("pretraining_tp") not in (None, 1):
        require_supported_value(raw, "slow_but_exact", (False, None), None)
    return _gpt2_common.config_from_hf(
        raw,
        hidden=("hidden_size", "n_embed"),
        heads=("num_attention_heads", "n_head"),
        layers=("num_hidden_layers", "n_layer"),
        max_len=positive_int(raw, "seq_length", default=2048),
        alibi=AlibiConfig(),
        embedding_norm=True,
        activation="gelu_tanh",
        **ALL_BIASES_ENABLED,
    )
