"""MiniMax-M2: half of each head rotated, RMSNorm over all of q and of k, sigmoids over experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _llama_common
from modelmill.models._hf_config import (
    checked_rotary_channels,
    non_negative_float,
    positive_int,
    read_activation,
    require_supported_value,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import SELECTION_BIAS_PATTERNS, softmax_router_config
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.models.mixtral import MIXTRAL_EXPERT_NAMES
from modelmill.models.olmoe import QK_NORM_NAMES
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import SIGMOID
from modelmill.nn.moe_spec import MoESpec
from modelmill.nn.qkv_norm import ALL_HEADS_RMS_NORM, QKNormConfig

Model = Decoder
SELECTION_BIAS_SOURCE = SourceTensors(("block_sparse_moe.e_score_correction_bias",))
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **QK_NORM_NAMES, **MIXTRAL_EXPERT_NAMES},
    tensors={"mlp.routing.selection_bias": SELECTION_BIAS_SOURCE},
)
SUPPORTED_VALUES = {
    "use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,), "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1.0,), "layernorm_mlp_beta": (1.0,),
}  # fmt: skip
# of layers that this model has not, and of multi-token prediction
UNUSED_CONFIG_KEYS = (
    "layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode", "use_mtp",
    "mtp_transformer_layers", "num_mtp_modules",
)  # fmt: skip
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in MiniMaxM2Config."""
    raw = with_config_defaults(raw, {"head_dim": 128})
    kinds = raw.get("attn_type_list")
    if isinstance(kinds, list):  # 1: full attention
        require_supported_value(
            {"attn_type_list": [*{*map(str, kinds)}]}, "attn_type_list", (["1"],), None
        )
    if raw.get("rotary_dim") is not None:
        turned, dim = positive_int(raw, "rotary_dim"), positive_int(raw, "head_dim")
        checked_rotary_channels("rotary_dim", turned, turned)
        raw = with_config_defaults(raw, {"partial_rotary_factor": turned / dim})
    act = read_activation(raw, "hidden_act", "silu")
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(kv_heads=8, positions=196608, theta=5000000.0),
        partial=1.0,
        activation=act,
        qkv_norm=QKNormConfig(
            ALL_HEADS_RMS_NORM, non_negative_float(raw, "rms_norm_eps", default=1e-6)
        ),
    )
    router = softmax_router_config(raw, experts=256, top_k=8, renormalize=True)
    router = replace(router, scores=SIGMOID, selection_bias=True)
    expert = MLPSpec(config.hidden, config.inner, activation=act)
    return replace(config, moe=MoESpec(router, expert))
