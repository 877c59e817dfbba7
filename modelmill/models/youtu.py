"""Youtu-LLM (``YoutuForCausalLM``): DeepSeek-V3's attention with a plain MLP in every layer."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _deepseek_common
from modelmill.models._deepseek_common import decoder_config
from modelmill.models._hf_config import read_boolean
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = _deepseek_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = (*_deepseek_common.UNUSED_CONFIG_KEYS, "embedding_initializer_range")
PLACEHOLDER_MOE_SIZES = {
    "moe_intermediate_size": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in YoutuConfig."""
    config = decoder_config(
        with_config_defaults(raw, {"tie_word_embeddings": True}, overrides=PLACEHOLDER_MOE_SIZES),
        RouterConfig(1, 1),
        positions=131072,
        neighbours=read_boolean(raw, "rope_interleave", True),
        defaults=PLACEHOLDER_MOE_SIZES,
    )
    return replace(config, moe=None)
