"""ERNIE 4.5 with experts: neighbouring channels rotated, experts chosen with a learned bias."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _llama_common, ernie4_5
from modelmill.models._hf_config import linear_bias_fields, non_negative_float, positive_int
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._moe_config import (
    EXPERT_NAMES,
    MAX_EXPERTS,
    SELECTION_BIAS_PATTERNS,
    SHARED_EXPERT_NAMES,
    moe_spec_with_shared_experts,
)
from modelmill.models._rename_rules import IGNORED_BUFFERS, CheckpointLayout, SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig

Model = Decoder
SELECTION_BIAS_SOURCE = SourceTensors(
    ("mlp.moe_statics.e_score_correction_bias",), "flatten"
)  # [1, E]
CHECKPOINT_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES},
    neighbours=True,
    tensors={"mlp.routing.selection_bias": SELECTION_BIAS_SOURCE},
    ignored=(*IGNORED_BUFFERS, r"model\.mtp_.*"),  # of multi-token prediction
)
SUPPORTED_VALUES = {"moe_gate_act": ("softmax",), "moe_use_aux_free": (True,)}
# capacities and the gate's kernel are of training; the rest is of multi-token prediction
UNUSED_CONFIG_KEYS = ("moe_capacity", "moe_gate", "num_nextn_predict_layers")
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Ernie4_5_MoeConfig."""
    biases = linear_bias_fields(raw, "use_bias", False)
    config = _llama_common.config_from_hf(
        raw,
        replace(ernie4_5.CONFIG_DEFAULTS, kv_heads=4, head_dim=None),
        head_bias=biases["mlp_bias"],
        **biases,
    )
    if non_negative_float(raw, "moe_norm_min", default=1e-12) > 1e-6:  # below every real sum
        raise CheckpointError("config.json: moe_norm_min must be at most 1e-06")
    # each has a second name, which transformers reads too
    experts = positive_int(raw, "moe_num_experts", "num_experts", default=64, max_value=MAX_EXPERTS)
    top_k = positive_int(raw, "moe_k", "num_experts_per_tok", default=6, max_value=experts)
    router = RouterConfig(experts, top_k, selection_bias=True)
    inner = positive_int(raw, "moe_intermediate_size", default=1536)
    shared = 0
    if raw.get("moe_num_shared_experts") != 0:
        shared = positive_int(raw, "moe_num_shared_experts", default=2, max_value=64)
    return replace(
        config,
        moe=moe_spec_with_shared_experts(config, router, inner, shared, bias=config.mlp_bias),
        dense_layers=_dense_layers(raw, config.layers),
    )


def _dense_layers(raw: RawConfig, layers: int) -> frozenset[int]:
    """Layers before the first and behind the last with experts, and those between every n-th."""
    every = positive_int(raw, "moe_layer_interval", default=1)
    first, last = (raw.get(f"moe_layer_{end}_index") for end in ("start", "end"))
    first, last = 1 if first is None else first, layers - 1 if last in (None, -1) else last
    if type(first) is not int or type(last) is not int or not 0 <= first <= last < layers:
        raise CheckpointError(
            f"config.json: moe_layer_start_index to moe_layer_end_index are no layers of {layers}"
        )
    return frozenset(i for i in range(layers) if not first <= i <= last or (i + 1) % every)
