"""Keys of config.json that name a router's rule, and the values that the family's router has.

Published configs name the rule of their router in many ways. Where a family does not read such a
key, its value must be what the family computes: another one would choose or weight other experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelmill.nn.moe import RouterConfig

SCORE_KEYS = (
    "scoring_func", "scoring_function", "score_func", "score_function", "router_scoring",
    "router_scoring_func", "router_score_function", "moe_router_score_function", "router_type",
    "router_activation", "router_activation_func", "moe_router_activation_func", "moe_gate_act",
    "gating_func", "gating_function", "gate_activation", "router_act",
)  # fmt: skip
"""What makes scores of the router's logits."""


def router_rule_values(model_config: Any) -> Mapping[str, tuple[Any, ...]]:
    """Return key → the values that a model's router has; {} without experts."""
    moe = getattr(model_config, "moe", None)
    router: RouterConfig | None = getattr(moe, "router", None)
    if router is None:
        return {}
    ungrouped = router.groups == 1
    return {
        **dict.fromkeys(SCORE_KEYS, (router.scores,)),
        "topk_method": _topk_methods(router),
        "norm_topk_prob": (router.renormalize,),
        "moe_renormalize": (router.renormalize,),
        "routed_scaling_factor": (router.scale,),
        "router_scaling_factor": (router.scale,),
        "n_group": (router.groups, 0) if ungrouped else (router.groups,),
        "topk_group": (router.top_groups, 0) if ungrouped else (router.top_groups,),
        "use_routing_bias": (router.selection_bias,),
        "use_expert_bias": (router.selection_bias,),
    }


def _topk_methods(router: RouterConfig) -> tuple[str, ...]:
    """Return DeepSeek's names of how the experts of a token are chosen."""
    if router.selection_bias:
        return ("noaux_tc",)
    return ("greedy",) if router.groups == 1 else ("group_limited_greedy",)
