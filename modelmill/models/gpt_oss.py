"""gpt-oss: experts in MXFP4 with a clamped gate, attention sinks, every other layer a window.

arXiv:2508.10925. The checkpoint's reader presents the stacked experts one by one
(``checkpoint.gpt_oss_experts``).
"""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.read_tracking_config import (
    RawConfig,
    with_config_defaults,
    with_config_overrides,
)
from modelmill.models import _llama_common
from modelmill.models._hf_config import attention_bias_fields, num_layers, positive_float
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import EXPERT_NAMES, softmax_router_config
from modelmill.models._rename_rules import CheckpointLayout
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe_spec import MoESpec
from modelmill.ops.fused_moe import SwigluOaiParams

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES,
        **EXPERT_NAMES,
        "attn.core": ("self_attn",),  # the sinks
        "mlp.router": ("mlp.router",),
    }
)
# the trained length, which rope_scaling has as well, and num_experts_per_tok under its old name
UNUSED_CONFIG_KEYS = ("initial_context_length", "experts_per_token")
DEFAULT_YARN_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in GptOssConfig."""
    raw = with_config_defaults(
        raw, {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    )
    if raw.get("rope_parameters") is None and not raw.get("rope_scaling"):
        raw = with_config_overrides(raw, {"rope_parameters": DEFAULT_YARN_SCALING})
    layers = num_layers(raw, "num_hidden_layers")
    config = _llama_common.config_from_hf(
        raw,
        ConfigDefaults(positions=131072, eps=1e-5, theta=150000.0),
        sinks=True,
        **attention_bias_fields(raw, default=True),
        windows=_llama_common.windows_with_full_every_nth_layer(raw, layers, 2),
    )
    # a softmax over the chosen experts' logits
    router = replace(softmax_router_config(raw, experts=128, top_k=4, renormalize=True), bias=True)
    clamp = SwigluOaiParams(
        positive_float(raw, "swiglu_alpha", default=1.702),
        positive_float(raw, "swiglu_limit", default=7.0),
    )
    expert = MLPSpec(config.hidden, config.inner, bias=True, clamp=clamp)
    return replace(config, moe=MoESpec(router, expert))
