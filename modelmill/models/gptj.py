"""GPT-J: attention and MLP side by side behind one norm, neighbouring channels rotated."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _gpt2_common
from modelmill.models._hf_config import (
    check_even_head_dim,
    checked_rotary_channels,
    positive_int,
    read_activation,
)
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.parallel_residual_layer import ParallelResidualLayer
from modelmill.nn.rotary import RopeSpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    **_gpt2_common.NON_LAYER_NAMES,
    neighbours=True,
    ignored=(r".*\.attn\.(masked_)?bias",),
    names={
        "attn_norm": ("ln_1",),
        "attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attn.o_proj": ("attn.out_proj",),
        "mlp.fc_proj": ("mlp.fc_in",),
        "mlp.down_proj": ("mlp.fc_out",),
    },
)
SUPPORTED_VALUES = {"rotary": (True,), "scale_attn_weights": (True,)}


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GPTJConfig."""
    positions = positive_int(raw, "n_positions", "max_position_embeddings", default=2048)
    config = _gpt2_common.config_from_hf(
        raw,
        inner=("n_inner",),
        max_len=positions,
        tied=False,
        layer=ParallelResidualLayer,
        activation=read_activation(raw, "activation_function", "gelu_new"),
        mlp_bias=True,
        head_bias=True,
    )
    check_even_head_dim("n_head", config.heads, config.head_dim)
    rotated = positive_int(raw, "rotary_dim", default=64, max_value=config.head_dim)
    dim = checked_rotary_channels("rotary_dim", rotated, rotated)
    return replace(config, rope=RopeSpec(dim, 1e4, positions))
