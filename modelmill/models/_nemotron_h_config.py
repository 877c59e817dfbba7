"""Reads which branch each layer of a Nemotron-H has, and its recurrence and experts."""

from __future__ import annotations

from typing import Any, NamedTuple

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models._hf_config import (
    exact_quotient,
    non_negative_float,
    positive_int,
    read_boolean,
)
from modelmill.models._mamba_config import conv_width
from modelmill.models._moe_config import group_limited_router
from modelmill.nn.mamba2 import Mamba2Spec
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import RouterConfig
from modelmill.nn.moe_spec import MoESpec

LAYER_TYPE_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Of ``hybrid_override_pattern``."""
LAYER_TYPE_BY_NAME = {
    **{name: name for name in LAYER_TYPE_BY_LETTER.values()},
    "mamba": "linear_attention", "attention": "full_attention",
}  # fmt: skip
"""Of lists, those before transformers 5 too."""
LAYER_TYPE_KEYS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
DEFAULT_LAYER_TYPES = ["linear_attention", "moe", "full_attention", "mlp"]


class LayerIndicesByBranch(NamedTuple):
    """The layers by their branch: Mamba2, an MLP, experts; the others have attention."""

    number: int
    recurrent: frozenset[int]
    mlp: frozenset[int]
    experts: frozenset[int]


def read_layer_indices_by_branch(raw: RawConfig) -> LayerIndicesByBranch:
    """The layers' branches, from ``layers_block_type`` or ``hybrid_override_pattern``.

    Raises:
        CheckpointError: for other types, and for keys that contradict each other.
    """
    keys = [key for key in LAYER_TYPE_KEYS if raw.get(key) is not None]
    named = {key: _read_layer_types(key, raw[key]) for key in keys}
    names = next(iter(named.values()), DEFAULT_LAYER_TYPES)
    for key, others in named.items():
        if others != names:
            raise CheckpointError(
                f"config.json: {keys[0]} and {key} contradict each other; correct one of them"
            )
    if raw.get("num_hidden_layers") not in (None, len(names)):
        raise CheckpointError(
            f"config.json: num_hidden_layers={quote(raw['num_hidden_layers'], 20)} where "
            f"{next(iter(keys), 'layers_block_type')} names {len(names)} layers; correct one"
        )
    recurrent, mlp, moe = (
        frozenset(layer for layer, name in enumerate(names) if name == kind)
        for kind in ("linear_attention", "mlp", "moe")
    )
    return LayerIndicesByBranch(len(names), recurrent, mlp, moe)


def _read_layer_types(key: str, listed: Any) -> list[str]:
    """The branch of each layer, under today's names.

    Raises:
        CheckpointError: for what is no list of them, or no string of their letters.
    """
    known = LAYER_TYPE_BY_LETTER if isinstance(listed, str) else LAYER_TYPE_BY_NAME
    if not isinstance(listed, list | str) or not listed:
        raise CheckpointError(
            f"config.json: {key} must be a list of layers, not {quote(listed, 60)}"
        )
    unknown = next((each for each in listed if known.get(str(each)) is None), None)
    if unknown is not None:
        raise CheckpointError(
            f"config.json: {key} names {quote(unknown, 60)}, which is not computed (known: "
            f"{', '.join(known)})"
        )
    return [known[each] for each in listed]


def mamba_spec(raw: RawConfig) -> Mamba2Spec:
    """The recurrence; its sizes have names of Mamba2's as well."""
    heads = positive_int(raw, "mamba_num_heads", default=128)
    groups = positive_int(raw, "n_groups", "mamba_n_groups", default=8)
    exact_quotient("mamba_num_heads", heads, "n_groups", groups)
    width_key = "conv_kernel" if raw.get("conv_kernel") is not None else "mamba_d_conv"
    bias_key = "use_conv_bias" if raw.get("mamba_conv_bias") is None else "mamba_conv_bias"
    return Mamba2Spec(
        positive_int(raw, "hidden_size"), heads,
        positive_int(raw, "mamba_head_dim", default=64, max_value=1024),
        positive_int(raw, "ssm_state_size", default=128, max_value=1024), groups,
        conv_width(raw, width_key), non_negative_float(raw, "layer_norm_epsilon", default=1e-5),
        read_boolean(raw, "use_bias", False), read_boolean(raw, bias_key, True),
    )  # fmt: skip


def moe_spec(raw: RawConfig, mlp: MLPSpec) -> MoESpec:
    """The experts, and the one that every token has; only that one may have biases."""
    router = group_limited_router(raw, RouterConfig(8, 2))
    inner = positive_int(raw, "moe_intermediate_size", default=7688)
    shared = positive_int(raw, "moe_shared_expert_intermediate_size", default=7688)
    expert = MLPSpec(mlp.hidden, inner, gated=False, activation=mlp.activation)
    return MoESpec(
        router, expert,
        MLPSpec(mlp.hidden, shared, gated=False, activation=mlp.activation, bias=mlp.bias),
    )  # fmt: skip
