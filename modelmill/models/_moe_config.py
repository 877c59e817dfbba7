"""Reads the fields of a config.json that describe a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.models._hf_config import positive_int
from modelmill.nn.moe import RouterConfig

MAX_EXPERTS = 4096
EXPERT_KEYS = ("num_experts", "num_local_experts")
# the checkpoint's names of a router and of single experts, where they are called as in Qwen's files
EXPERT_NAMES = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.*.gate_up_proj": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "mlp.experts.*.down_proj": ("mlp.experts.*.down_proj",),
}

SHARED = "mlp.shared_expert"
# those of the shared expert and its gate
SHARED_NAMES = {
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
    f"{SHARED}.gate_up_proj": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    f"{SHARED}.down_proj": (f"{SHARED}.down_proj",),
}


def router_config(
    raw: Mapping[str, Any], *, experts: int, top_k: int, renormalize: bool
) -> RouterConfig:
    """The router of a softmax over all experts.

    Args:
        raw: The config.
        experts: How many experts there are where config.json is silent.
        top_k: How many each token has, likewise.
        renormalize: Whether the weights of a token's experts sum to 1.

    Raises:
        CheckpointError: for more experts a token than there are.
    """
    key = next((key for key in EXPERT_KEYS if raw.get(key) is not None), EXPERT_KEYS[0])
    count = positive_int(raw, key, default=experts, max_value=MAX_EXPERTS)
    chosen = positive_int(raw, "num_experts_per_tok", default=top_k, max_value=MAX_EXPERTS)
    if chosen > count:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={chosen} is more than the {count} experts of {key}; "
            "correct one of them"
        )
    return RouterConfig(count, chosen, renormalize=renormalize)


def dense_layers(raw: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Layers with a plain MLP, from ``mlp_only_layers`` and ``decoder_sparse_step``.

    Every ``decoder_sparse_step``-th layer has experts, if it is not in ``mlp_only_layers``.

    Raises:
        CheckpointError: for what is no list of layers.
    """
    only = raw.get("mlp_only_layers") or []
    every = positive_int(raw, "decoder_sparse_step", default=1)
    if not isinstance(only, list) or not all(
        type(layer) is int and 0 <= layer < layers for layer in only
    ):
        raise CheckpointError(
            f"config.json: mlp_only_layers must be a list of layers below {layers}, not "
            f"{quote(only, 60)}"
        )
    return frozenset(layer for layer in range(layers) if layer in only or (layer + 1) % every)
