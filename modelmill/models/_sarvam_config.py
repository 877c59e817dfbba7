"""Reads the keys that Sarvam's published files name otherwise than its configuration classes."""

from __future__ import annotations

from typing import Any

from modelmill.core.read_tracking_config import RawConfig, with_config_overrides
from modelmill.models._hf_config import positive_int
from modelmill.models._moe_config import MAX_EXPERTS

EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
SHARED_COUNT_KEYS = ("num_shared_experts", "n_shared_experts")
# a shift of the bias, by which it is stored, changes no choice
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "use_bias": (False,), "moe_router_enable_expert_bias": (True,), "norm_head": (False,),
}  # fmt: skip
UNUSED_CONFIG_KEYS = (
    "embedding_dropout", "max_window_layers", "num_mtp_layers", "num_nextn_predict_layers",
    "output_dropout",
)  # fmt: skip


def with_expert_counts(raw: RawConfig, experts: int) -> RawConfig:
    """The config with the numbers of experts under the names of the configuration classes.

    Args:
        raw: The config.
        experts: How many there are where it is silent.
    """
    counts = {
        "n_routed_experts": positive_int(
            raw, *EXPERT_COUNT_KEYS, default=experts, max_value=MAX_EXPERTS
        ),
        "n_shared_experts": positive_int(raw, *SHARED_COUNT_KEYS, default=1, max_value=64),
    }
    return with_config_overrides(raw, counts)
