"""LFM2 with experts (LFM2-8B-A1B): LFM2's layers, experts chosen by sigmoids and a learned bias."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models import _lfm2_config
from modelmill.models._hf_config import positive_float, positive_int, read_boolean
from modelmill.models._lfm2_config import LFM2_NAMES, hybrid_config
from modelmill.models._moe_config import SELECTION_BIAS_PATTERNS, softmax_router_config
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import SIGMOID
from modelmill.nn.moe_spec import MoESpec

Model = Decoder
CHECKPOINT_LAYOUT = CheckpointLayout(
    {
        **LFM2_NAMES,
        "mlp.router": ("feed_forward.gate",),
        "mlp.experts.*.gate_up_proj": ("feed_forward.experts.*.w1", "feed_forward.experts.*.w3"),
        "mlp.experts.*.down_proj": ("feed_forward.experts.*.w2",),
    },
    norm="model.embedding_norm",
    tensors={"mlp.routing.selection_bias": SourceTensors(("feed_forward.expert_bias",))},
)
SUPPORTED_VALUES = _lfm2_config.SUPPORTED_VALUES
UNUSED_CONFIG_KEYS = _lfm2_config.UNUSED_CONFIG_KEYS
FLOAT32_TENSORS = SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in Lfm2MoeConfig."""
    config = hybrid_config(raw, raw.get("layer_types"))
    router = replace(
        softmax_router_config(
            raw,
            experts=32,
            top_k=4,
            renormalize=read_boolean(raw, "norm_topk_prob", True),
            keys=("num_experts",),
        ),
        scores=SIGMOID,
        sum_eps=1e-6,
        scale=positive_float(raw, "routed_scaling_factor", default=1.0),
        selection_bias=read_boolean(raw, "use_expert_bias", True),
    )
    inner = positive_int(raw, "moe_intermediate_size", default=1792)
    dense = raw.get("num_dense_layers", 2)
    if type(dense) is not int or dense < 0:
        raise CheckpointError(
            f"config.json: num_dense_layers must be an integer from 0 up, not {quote(dense, 60)}"
        )
    return replace(
        config,
        moe=MoESpec(router, MLPSpec(config.hidden, inner)),
        dense_layers=frozenset(range(min(dense, config.layers))),
    )
