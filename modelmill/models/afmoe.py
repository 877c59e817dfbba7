"""Arcee Trinity (``AfmoeForCausalLM``): gated attention, windows that alone rotate, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.read_tracking_config import RawConfig, with_config_defaults
from modelmill.models import _hf_config, _llama_common
from modelmill.models._llama_common import CHECKPOINT_NAMES, ConfigDefaults
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    SELECTION_BIAS_PATTERNS,
    SHARED_EXPERT_NAMES,
    leading_dense_layer_indices,
    moe_spec_with_shared_experts,
    softmax_router_config,
)
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import SIGMOID
from modelmill.nn.sandwich import SandwichLayer

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **CHECKPOINT_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES,
        "attn.gate_proj": ("self_attn.gate_proj",), "attn_post": ("post_attention_layernorm",),
        "mlp_norm": ("pre_mlp_layernorm",), "mlp_post": ("post_mlp_layernorm",),
        "mlp.router": ("mlp.router.gate",),
    },
    tensors={"mlp.routing.selection_bias": SourceTensors(("mlp.expert_bias",))},
    separate_gates=True,
)  # fmt: skip
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "route_norm": (True,), "num_expert_groups": (1,), "num_limited_groups": (1,),
}  # fmt: skip
UNUSED_CONFIG_KEYS = ("load_balance_coeff", "use_grouped_mm")
CONFIG_DEFAULTS = ConfigDefaults(head_dim=128, positions=16384, eps=1e-5, activation="silu")


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in AfmoeConfig."""
    config = _llama_common.config_from_hf(
        raw, CONFIG_DEFAULTS, **_hf_config.attention_bias_fields(raw), layer=SandwichLayer,
        qk_norm=True, output_gate=True, gate_bias=False,
    )  # fmt: skip
    scaled = _hf_config.read_boolean(raw, "mup_enabled", False)
    every = _hf_config.positive_int(raw, "global_attn_every_n_layers", default=4)
    windows = _llama_common.windows_with_full_every_nth_layer(
        with_config_defaults(raw, {"sliding_window": 1024}), config.layers, every
    )
    router = replace(
        softmax_router_config(raw, experts=64, top_k=6, renormalize=True),
        scores=SIGMOID,
        scale=_hf_config.positive_float(raw, "route_scale", default=1.0),
        selection_bias=True,
    )
    inner = _hf_config.positive_int(raw, "moe_intermediate_size", default=1408)
    shared = _hf_config.positive_int(raw, "num_shared_experts", default=2, max_value=64)
    return replace(
        config,
        windows=windows,
        unrotated_layers=frozenset(i for i, size in enumerate(windows) if size is None),
        embedding_scale=config.hidden**0.5 if scaled else None,
        moe=moe_spec_with_shared_experts(config, router, inner, shared),
        dense_layers=leading_dense_layer_indices(raw, config.layers, 1, "num_dense_layers"),
    )
