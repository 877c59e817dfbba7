"""Reads the fields of a config.json that describe a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from modelmill.core.errors import CheckpointError
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import RawConfig
from modelmill.models._hf_config import (
    positive_float,
    positive_int,
    read_boolean,
    read_per_layer_list,
)
from modelmill.models._llama_common import CHECKPOINT_NAMES
from modelmill.models._rename_rules import CheckpointLayout, SourceTensors
from modelmill.nn.decoder import DecoderConfig
from modelmill.nn.mlp import MLPSpec
from modelmill.nn.moe import SIGMOID, RouterConfig
from modelmill.nn.moe_spec import MoESpec

MAX_EXPERTS = 4096
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts")
# the checkpoint's names of a router and of single experts, where they are called as in Qwen's files
EXPERT_NAMES = {
    "mlp.router": ("mlp.gate",),
    "mlp.experts.*.gate_up_proj": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "mlp.experts.*.down_proj": ("mlp.experts.*.down_proj",),
}
# those of Granite's files, which have one tensor for all experts
STACKED_EXPERT_NAMES = {
    "mlp.router": ("block_sparse_moe.router.layer",),
    "mlp.experts.*.gate_up_proj": ("block_sparse_moe.input_linear",),
    "mlp.experts.*.down_proj": ("block_sparse_moe.output_linear",),
}
# those of DeepSeek's files besides
SHARED_EXPERT_NAMES = {
    "mlp.shared_expert.gate_up_proj": (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    "mlp.shared_expert.down_proj": ("mlp.shared_experts.down_proj",),
}
# its steps are as large as differences between scores in bfloat16
SELECTION_BIAS_PATTERNS = (r"layers\.\d+\.mlp\.routing\.selection_bias",)
SHARED_EXPERTS_LAYOUT = CheckpointLayout(
    {**CHECKPOINT_NAMES, **EXPERT_NAMES, **SHARED_EXPERT_NAMES},
    tensors={"mlp.routing.selection_bias": SourceTensors(("mlp.gate.e_score_correction_bias",))},
)

SHARED_EXPERT_PATH = "mlp.shared_expert"
# those of the shared expert and its gate
GATED_SHARED_EXPERT_NAMES = {
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
    f"{SHARED_EXPERT_PATH}.gate_up_proj": (
        f"{SHARED_EXPERT_PATH}.gate_proj",
        f"{SHARED_EXPERT_PATH}.up_proj",
    ),
    f"{SHARED_EXPERT_PATH}.down_proj": (f"{SHARED_EXPERT_PATH}.down_proj",),
}


def softmax_router_config(
    raw: RawConfig,
    *,
    experts: int,
    top_k: int,
    renormalize: bool,
    keys: tuple[str, ...] = NUM_EXPERTS_KEYS,
) -> RouterConfig:
    """The router of a softmax over all experts.

    Args:
        raw: The config.
        experts: How many experts there are where config.json is silent.
        top_k: How many each token has, likewise.
        renormalize: Whether the weights of a token's experts sum to 1.
        keys: Those of NUM_EXPERTS_KEYS that the family's config class reads.

    Raises:
        CheckpointError: for more experts a token than there are, or keys that contradict each
            other.
    """
    key = next((key for key in keys if raw.get(key) is not None), keys[0])
    count = positive_int(raw, key, default=experts, max_value=MAX_EXPERTS)
    _refuse_conflicting_expert_counts(raw, key, count)
    chosen = positive_int(raw, "num_experts_per_tok", default=top_k, max_value=MAX_EXPERTS)
    if chosen > count:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={chosen} is more than the {count} experts of {key}; "
            "correct one of them"
        )
    return RouterConfig(count, chosen, renormalize=renormalize)


def _refuse_conflicting_expert_counts(raw: RawConfig, key: str, count: int) -> None:
    """Refuse another number of experts under a key that the family does not read.

    Args:
        raw: The config.
        key: What the family reads.
        count: Its value, or the number where it is absent.
    """
    for other in (*NUM_EXPERTS_KEYS, "n_routed_experts"):
        value = raw.get(other)
        if value is not None and value != count:
            raise CheckpointError(
                f"config.json: {other}={quote(value, 20)} contradicts {key}, which makes it "
                f"{count} experts{'' if raw.get(key) else ' where it is absent'}; remove {other}, "
                f"or correct {key}"
            )


def norm_topk_router(
    raw: RawConfig, *, experts: int, top_k: int, renormalize: bool
) -> RouterConfig:
    """A softmax router with ``norm_topk_prob``, or ``renormalize`` where that is not there."""
    normalized = read_boolean(raw, "norm_topk_prob", renormalize)
    return softmax_router_config(raw, experts=experts, top_k=top_k, renormalize=normalized)


def group_limited_router(raw: RawConfig, defaults: RouterConfig) -> RouterConfig:
    """The router of DeepSeek-V3 and GLM-4.5: sigmoids, groups of experts, a bias of the choice.

    Args:
        raw: The config.
        defaults: What the router is where config.json is silent.

    Raises:
        CheckpointError: for groups that do not divide the experts, or have too few of them.
    """
    count = positive_int(raw, "n_routed_experts", default=defaults.experts, max_value=MAX_EXPERTS)
    _refuse_conflicting_expert_counts(raw, "n_routed_experts", count)
    chosen = positive_int(raw, "num_experts_per_tok", default=defaults.top_k, max_value=MAX_EXPERTS)
    parts = positive_int(raw, "n_group", default=defaults.groups, max_value=MAX_EXPERTS)
    chosen_parts = positive_int(
        raw, "topk_group", default=defaults.top_groups, max_value=MAX_EXPERTS
    )
    if count % parts or chosen_parts > parts or (parts > 1 and count // parts < 2):
        raise CheckpointError(
            f"config.json: n_group={parts} and topk_group={chosen_parts} do not fit "
            f"n_routed_experts={count}: groups are of one size, from 2 up, and not more of them "
            "are chosen than there are"
        )
    if chosen > count // parts * chosen_parts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok={chosen} is more than the "
            f"{count // parts * chosen_parts} experts of {chosen_parts} groups (n_routed_experts, "
            "n_group, topk_group); correct one of them"
        )
    return RouterConfig(
        count,
        chosen,
        scores=SIGMOID,
        renormalize=read_boolean(raw, "norm_topk_prob", defaults.renormalize),
        scale=positive_float(raw, "routed_scaling_factor", default=defaults.scale),
        groups=parts,
        top_groups=chosen_parts,
        selection_bias=True,
    )


def moe_spec_with_shared_experts(
    config: DecoderConfig, router: RouterConfig, inner: int, num_shared: int, *, bias: bool = False
) -> MoESpec:
    """Experts of ``inner`` channels, and shared ones as one MLP of ``num_shared`` times as many.

    bias: whether the shared ones have biases.
    """
    expert = MLPSpec(config.hidden, inner, activation=config.activation)
    shared = replace(expert, inner=num_shared * inner, bias=bias) if num_shared else None
    return MoESpec(router, expert, shared)


def leading_dense_layer_indices(
    raw: RawConfig, layers: int, default: int, key: str = "first_k_dense_replace"
) -> frozenset[int]:
    """The first layers, which have a plain MLP.

    Args:
        raw: The config.
        layers: How many there are.
        default: How many of them have one where config.json is silent.
        key: The name of that number there.

    Raises:
        CheckpointError: for more of them than there are layers.
    """
    value = raw.get(key)
    count = default if value is None else value
    if type(count) is not int or not 0 <= count <= layers:
        raise CheckpointError(
            f"config.json: {key} must be an integer from 0 to {layers} "
            f"(num_hidden_layers), not {quote(count, 60)}"
        )
    return frozenset(range(count))


def dense_layers_by_mlp_type(raw: RawConfig, layers: int, *, dense: int) -> frozenset[int]:
    """Layers with a plain MLP, from ``mlp_layer_types``; without it the first ``dense`` ones.

    Raises:
        CheckpointError: for other types than "dense" and "sparse", or another number of layers.
    """
    is_known = ("dense", "sparse").__contains__
    types = read_per_layer_list(raw, "mlp_layer_types", layers, is_known, "'dense' or 'sparse'")
    if types is None:
        return frozenset(range(min(dense, layers)))
    return frozenset(layer for layer, each in enumerate(types) if each == "dense")


def dense_layers(raw: RawConfig, layers: int) -> frozenset[int]:
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
