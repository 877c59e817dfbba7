"""A whole mixture of experts for a few tokens (fused op): router, choice and experts in one call.

It computes what the ops that it replaces compute one after another. An implementation saves the
host's work between them, which takes as long as a part of the experts. See ``OpDeclaration``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from modelmill.ops import int4_fused_moe, int8_fused_moe, mxfp4_fused_moe
from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_moe import TOLERANCE as TOLERANCE
from modelmill.ops.fused_moe import FusedMoEInputs, moe_cost
from modelmill.ops.fused_topk import SIGMOID, SOFTMAX, FusedTopkInputs, fused_topk
from modelmill.ops.op_cost import OpCost, product_cost, tensor_bytes
from modelmill.ops.router_gemm import router_gemm


@dataclass(frozen=True, eq=False)
class RoutedMoEWeights:
    """The weights of a mixture and the rules of its router.

    Attributes:
        op: name of the op that computes the experts.
        experts: its inputs; x, topk_weights, topk_ids and shared are of no tokens.
        router: [E, H].
        rules: how experts are chosen; the logits are of no tokens.
        router_bias: [E], added to the logits, or None.
        logit_scale: factor of the products with the router.
        expert_scale: [E], factors of the experts' weights, or None.
        packed: what an implementation derived from the weights (its cache).
    """

    op: str
    experts: FusedMoEInputs
    router: torch.Tensor
    rules: FusedTopkInputs
    router_bias: torch.Tensor | None = None
    logit_scale: float = 1.0
    expert_scale: torch.Tensor | None = None
    packed: dict[str, Any] = field(default_factory=dict, repr=False)


def _count_routed_moe(args: Mapping[str, Any], result: torch.Tensor) -> OpCost:
    """Count the router and the experts that it chooses, which are computed again for that."""
    x, moe, shared = args["x"], args["moe"], args.get("shared")
    router_input = args.get("router_input")
    inputs = _route(x, moe, x if router_input is None else router_input, shared)
    router_bytes = tensor_bytes((moe.router, moe.router_bias, moe.expert_scale))
    router = product_cost(
        tensor_bytes(router_input), router_bytes, 2 * x.shape[0] * moe.router.numel()
    )
    return router + moe_cost(inputs._asdict(), result)


DECLARATION = OpDeclaration(
    fuses=("router_gemm", "fused_topk", "int8_fused_moe", "int4_fused_moe", "mxfp4_fused_moe"),
    optional=True,
    cost=_count_routed_moe,
)


def routed_moe(
    x: torch.Tensor,
    moe: RoutedMoEWeights,
    router_input: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the experts of each token of x that the router chooses, plus ``shared``.

    Args:
        x: [T, H], floating point.
        moe: weights and rules.
        router_input: [T, H], what the router reads; None: x.
        shared: [T, H] of x's dtype, added to the sum of a token's experts, or None.

    Returns:
        [T, H] of x's dtype.
    """
    router_input = x if router_input is None else router_input
    inputs = _route(x, moe, router_input, shared)
    out: torch.Tensor = getattr(import_module(f"modelmill.ops.{moe.op}"), moe.op)(inputs)
    return out


def _route(
    x: torch.Tensor,
    moe: RoutedMoEWeights,
    router_input: torch.Tensor,
    shared: torch.Tensor | None,
) -> FusedMoEInputs:
    """The inputs of the experts' op, with those that the router chooses."""
    logits = router_gemm(router_input, moe.router, moe.router_bias, moe.logit_scale)
    weights, ids = fused_topk(moe.rules._replace(logits=logits))
    if moe.expert_scale is not None:
        weights = weights * moe.expert_scale.float()[ids.long()]
    return moe.experts._replace(x=x, topk_weights=weights, topk_ids=ids, shared=shared)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """All formats; biases, factors, groups and another input of the router."""
    modules = {
        "int8_fused_moe": int8_fused_moe, "int4_fused_moe": int4_fused_moe,
        "mxfp4_fused_moe": mxfp4_fused_moe,
    }  # fmt: skip
    for op, module in modules.items() if device == "cpu" else ():
        for number, case in enumerate(module.cases(device, dtype)):
            inputs = FusedMoEInputs(**case.args)
            x, shared = inputs.x, inputs.shared
            count, hidden = len(inputs.gate_up), x.shape[1]
            draws = [
                randn(*shape, device=device, dtype=dtype, seed=number + 1, scale=scale)
                for shape, scale in (((count, hidden), 4 * hidden**-0.5), ((3, count), 0.5))
            ]
            rules = FusedTopkInputs(
                x.new_empty(0, count, dtype=torch.float32),
                draws[1][0] if number % 2 else None, inputs.topk_ids.shape[1],
                SIGMOID if number % 3 == 1 else SOFTMAX, renormalize=number % 2 == 0, scale=1.5,
            )  # fmt: skip
            if count % 4 == 0 and inputs.topk_ids.shape[1] == 2:
                rules = rules._replace(groups=4, top_groups=2, group_scores=1 + number % 2)
            extras = (draws[1][1], 0.5, draws[1][2]) if number % 2 else ()
            weights = RoutedMoEWeights(
                op, drop_tokens_keep_weights(inputs), draws[0], rules, *extras
            )
            router_input = randn(*x.shape, device=device, dtype=dtype, seed=99)
            args = {"x": x, "moe": weights, "shared": shared}
            args["router_input"] = router_input if number % 2 else None
            yield Case(f"{op.split('_')[0]} {case.name}", args)


def drop_tokens_keep_weights(inputs: FusedMoEInputs) -> FusedMoEInputs:
    """The same weights for no tokens."""
    return inputs._replace(
        x=inputs.x[:0], topk_weights=inputs.topk_weights[:0], topk_ids=inputs.topk_ids[:0],
        shared=None,
    )  # fmt: skip
