"""Mistral Small 4: latent attention whose queries grow with the position, softmax over experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _deepseek_common
from modelmill.models._deepseek_common import decoder_config
from modelmill.models._hf_config import config_object, positive_int, read_boolean
from modelmill.models._moe_config import group_limited_router
from modelmill.models.ministral3 import split_attention_temperature
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import SOFTMAX, RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = _deepseek_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = _deepseek_common.UNUSED_CONFIG_KEYS
CONFIG_DEFAULTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
DEFAULT_SIZES = {
    "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
}  # fmt: skip
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 8192, "mscale_all_dim": 1.0,
    "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
ROTATED_SHARE_KEY = "partial_rotary_factor"


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Mistral4Config."""
    raw = with_config_defaults(raw, DEFAULT_SIZES)
    _check_rotated_share(raw)
    plain, growth = split_attention_temperature(raw, DEFAULT_ROPE, idle=(ROTATED_SHARE_KEY,))
    router = replace(
        group_limited_router(raw, RouterConfig(128, 4)), scores=SOFTMAX, selection_bias=False
    )
    config = decoder_config(
        plain,
        router,
        positions=1048576,
        neighbours=read_boolean(raw, "rope_interleave", True),
        defaults=CONFIG_DEFAULTS,
    )
    return replace(config, attention_temperature=growth)


def _check_rotated_share(raw: RawConfig) -> None:
    """Check that the share of a head that is rotated is what the sizes say.

    Raises:
        CheckpointError: for another share.
    """
    turned = positive_int(raw, "qk_rope_head_dim")
    width = turned + positive_int(raw, "qk_nope_head_dim")
    for key in ("rope_scaling", "rope_parameters"):
        share = config_object(key, raw.get(key)).get(ROTATED_SHARE_KEY)
        if share not in (None, turned / width):
            raise CheckpointError(
                f"config.json: {key}.{ROTATED_SHARE_KEY}={quote(share, 60)} contradicts "
                f"qk_rope_head_dim={turned} of {width} channels of a head; correct one of them"
            )
