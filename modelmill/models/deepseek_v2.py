"""DeepSeek-V2 and V2-Lite: latent attention, softmax over experts, shared ones (arXiv:2405.04434).

Weights of a token's experts are not renormalised, as in transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models import _deepseek_common
from modelmill.models._deepseek_common import decoder_config
from modelmill.models._hf_config import positive_int, require_supported_value
from modelmill.models._moe_config import MAX_EXPERTS, group_limited_router
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.moe import SOFTMAX, RouterConfig

Model = Decoder
SUPPORTED_VALUES = {
    "mlp_bias": (False,), "norm_topk_prob": (False,), "scoring_func": ("softmax",),
    "moe_layer_freq": (1,),
}  # fmt: skip
CHECKPOINT_LAYOUT = _deepseek_common.CHECKPOINT_LAYOUT
# n_group and topk_group have an effect with one of the two methods alone, which reads them
UNUSED_CONFIG_KEYS = (*_deepseek_common.UNUSED_CONFIG_KEYS, "n_group", "topk_group")
CONFIG_DEFAULTS = {
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
}
GREEDY_TOPK_METHOD, GROUP_LIMITED_TOPK_METHOD = "greedy", "group_limited_greedy"


def config_from_hf(raw: RawConfig) -> DecoderConfig:
    """Sizes from config.json; what it does not name is as in DeepseekV2Config."""
    return decoder_config(
        raw, _router(raw), positions=2048, neighbours=True, defaults=CONFIG_DEFAULTS
    )


def _router(raw: RawConfig) -> RouterConfig:
    """The best experts of all, or of the groups with the best experts."""
    chosen = positive_int(raw, "num_experts_per_tok", max_value=MAX_EXPERTS)
    require_supported_value(
        raw, "topk_method", (GREEDY_TOPK_METHOD, GROUP_LIMITED_TOPK_METHOD), GREEDY_TOPK_METHOD
    )
    grouped = raw.get("topk_method", GREEDY_TOPK_METHOD) == GROUP_LIMITED_TOPK_METHOD
    if grouped and (raw.get("n_group") is None or raw.get("topk_group") is None):
        raise CheckpointError(
            f"config.json: topk_method={GROUP_LIMITED_TOPK_METHOD} needs n_group and topk_group"
        )
    settings: dict[str, Any] = {"norm_topk_prob": False}
    if not grouped:
        settings |= {"n_group": 1, "topk_group": 1}
    router = group_limited_router(with_config_overrides(raw, settings), RouterConfig(64, chosen))
    return replace(router, scores=SOFTMAX, selection_bias=False, group_scores=1)
