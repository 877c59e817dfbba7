"""K-EXAONE: EXAONE 4's attention behind norms in front, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _moe_config, exaone4
from modelmill.models._hf_config import positive_int, read_per_layer_list
from modelmill.models._moe_config import dense_layers_by_mlp_type
from modelmill.models._rename_rules import IGNORED_BUFFERS, SourceTensors
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import RouterConfig
from modelmill.nn.pre_norm import PreNormLayer

Model = Decoder
SELECTION_BIAS_SOURCE = SourceTensors(("mlp.e_score_correction_bias",))
CHECKPOINT_LAYOUT = replace(
    _moe_config.SHARED_EXPERTS_LAYOUT,
    tensors={"mlp.routing.selection_bias": SELECTION_BIAS_SOURCE},
    ignored=(*IGNORED_BUFFERS, r"mtp\..*"),  # of multi-token prediction
)
# of multi-token prediction, and a number of layers that is_moe_layer lists
UNUSED_CONFIG_KEYS = ("num_nextn_predict_layers", "first_last_k_dense_replace")
SUPPORTED_VALUES = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
FLOAT32_TENSORS = _moe_config.SELECTION_BIAS_PATTERNS


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in ExaoneMoeConfig."""
    config = replace(exaone4.config_from_hf(raw), layer=PreNormLayer)
    inner = positive_int(raw, "moe_intermediate_size", default=1024)
    shared = positive_int(raw, "num_shared_experts", default=1, max_value=64)
    experts = positive_int(raw, "num_experts", default=64)
    router = _moe_config.group_limited_router(
        with_config_overrides(raw, {"n_routed_experts": experts}),
        RouterConfig(experts, 8, scale=2.5),
    )
    return replace(
        config,
        moe=_moe_config.moe_spec_with_shared_experts(config, router, inner, shared),
        dense_layers=_dense_layers(raw, config.layers),
    )


def _dense_layers(raw: RawConfig, layers: int) -> frozenset[int]:
    """The layers with a plain MLP: those that a list names, or the first few.

    Raises:
        CheckpointError: for a list of other values, or of another length.
    """
    first = _moe_config.leading_dense_layer_indices(raw, layers, 1)
    dense = dense_layers_by_mlp_type(raw, layers, dense=len(first))
    marks = read_per_layer_list(
        raw, "is_moe_layer", layers, lambda mark: type(mark) is bool, "true or false"
    )
    if marks is None:
        return dense
    marked = frozenset(layer for layer, each in enumerate(marks) if not each)
    if raw.get("mlp_layer_types") is not None and marked != dense:
        raise CheckpointError(
            "config.json: mlp_layer_types and is_moe_layer contradict each other; remove one"
        )
    return marked
