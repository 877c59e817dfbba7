"""GLM-4-0414 (``Glm4ForCausalLM``): GLM with a norm behind each branch, too."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import glm
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.sandwich import SandwichLayer

Model = Decoder
POST_BRANCH_NORM_NAMES = {
    "attn_post": ("post_self_attn_layernorm",),
    "mlp_post": ("post_mlp_layernorm",),
}
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**glm.CHECKPOINT_NAMES, **POST_BRANCH_NORM_NAMES}, neighbours=True
)


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Glm4Config."""
    return replace(glm.config_from_hf(raw), layer=SandwichLayer)
