"""StarCoder 1 and SantaCoder (``GPTBigCodeForCausalLM``): GPT-2 with a single key and value."""

from __future__ import annotations

from dataclasses import replace

from modelmill.checkpoint.rename import Rule
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import (
    ALL_BIASES_ENABLED,
    positive_int,
    read_activation,
    read_boolean,
)
from modelmill.nn.decoder import Decoder, DecoderConfig

Model = Decoder
CHECKPOINT_LAYOUT = _gpt2_common.GPT2_LAYOUT
UNUSED_CONFIG_KEYS = (  # settings of one runtime
    "inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_batch_size",
    "pad_key_length",
)  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GPTBigCodeConfig."""
    config = _gpt2_common.config_from_hf(
        raw,
        inner=("n_inner",),
        max_len=positive_int(raw, "n_positions", "max_position_embeddings", default=1024),
        first_position_row=0,
        activation=read_activation(raw, "activation_function", "gelu_pytorch_tanh"),
        **ALL_BIASES_ENABLED,
    )
    return replace(config, kv_heads=1) if read_boolean(raw, "multi_query", True) else config


def rename_rules(config: DecoderConfig) -> list[Rule]:
    """Every tensor; with a key for each head, q, k and v of a head are beside each other."""
    return replace(CHECKPOINT_LAYOUT, grouped_qkv=config.kv_heads == config.heads).rename_rules(
        config
    )
