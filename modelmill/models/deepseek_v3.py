"""DeepSeek-V3 and R1: latent attention, sigmoids over experts in groups (arXiv:2412.19437).

The layer of multi-token prediction in the file is not used.
"""

from __future__ import annotations

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _deepseek_common
from modelmill.models._deepseek_common import SIGMOID_ROUTER_ALLOWED_VALUES, decoder_config
from modelmill.models._hf_config import read_boolean
from modelmill.models._moe_config import SELECTION_BIAS_PATTERNS, group_limited_router
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
CHECKPOINT_LAYOUT = _deepseek_common.CHECKPOINT_LAYOUT
UNUSED_CONFIG_KEYS = _deepseek_common.UNUSED_CONFIG_KEYS
SUPPORTED_VALUES = SIGMOID_ROUTER_ALLOWED_VALUES
CONFIG_DEFAULTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in DeepseekV3Config."""
    router = group_limited_router(raw, RouterConfig(256, 8, groups=8, top_groups=4, scale=2.5))
    return decoder_config(
        raw,
        router,
        positions=4096,
        neighbours=read_boolean(raw, "rope_interleave", True),
        defaults=CONFIG_DEFAULTS,
    )
