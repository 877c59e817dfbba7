"""Residual add, RMSNorm, a mixture's router and its choice of experts in one launch (fused op).

For few tokens each of the three ops that it replaces takes longer to start than to compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from modelmill.ops.add_rms_norm import add_rms_norm
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_topk import SIGMOID, SOFTMAX, FusedTopkInputs, fused_topk
from modelmill.ops.op_cost import OpCost, product_cost, tensor_bytes
from modelmill.ops.rms_norm import rms_norm
from modelmill.ops.router_gemm import router_gemm


class AddRMSNormRouterInputs(NamedTuple):
    """A branch, the residual stream, and the weights of norm and router.

    Attributes:
        x: [T, H], floating point.
        residual: [T, H] of x's dtype, or None: x is the stream.
        norm_weight: [H] of x's dtype.
        eps: added to the mean square.
        router: [E, H], floating point.
        rules: how experts are chosen; the logits are of no tokens, and there is no bias.
        router_bias: [E], added to the logits, or None.
        selection_bias: [E], the rules' bias, or None.
        logit_scale: factor of the products with the router.
    """

    x: torch.Tensor
    residual: torch.Tensor | None
    norm_weight: torch.Tensor
    eps: float
    router: torch.Tensor
    rules: FusedTopkInputs
    router_bias: torch.Tensor | None = None
    selection_bias: torch.Tensor | None = None
    logit_scale: float = 1.0


class RoutedTokens(NamedTuple):
    """Normed tokens with their experts.

    Attributes:
        x: [T, H].
        total: [T, H], the stream behind the addition.
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k] int32.
    """

    x: torch.Tensor
    total: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def _count_norm_and_router(args: Mapping[str, Any], result: RoutedTokens) -> OpCost:
    inputs = AddRMSNormRouterInputs(**args)
    acts = (inputs.x, inputs.residual, inputs.norm_weight, result)
    router = (inputs.router, inputs.router_bias, inputs.selection_bias)
    operations = 2 * len(inputs.x) * inputs.router.numel()
    return product_cost(tensor_bytes(acts), tensor_bytes(router), operations)


DECLARATION = OpDeclaration(
    fuses=("add_rms_norm", "router_gemm", "fused_topk"),
    optional=True,
    inputs=AddRMSNormRouterInputs,
    cost=_count_norm_and_router,
)

MAX_TOKENS = 4
"""Of an implementation: with more, the products with the router are the larger part."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def add_rms_norm_router(inputs: AddRMSNormRouterInputs) -> RoutedTokens:
    """Compute rms_norm(x + residual), the sum, and the experts that the router chooses of it.

    Implementations may write the sum into the residual's memory.
    """
    x, residual, weight, eps = inputs[:4]
    if residual is None:
        normed, total = rms_norm(x, weight, eps), x
    else:
        normed, total = add_rms_norm(x, residual, weight, eps)
    logits = router_gemm(normed, inputs.router, inputs.router_bias, inputs.logit_scale)
    weights, ids = fused_topk(inputs.rules._replace(logits=logits, bias=inputs.selection_bias))
    return RoutedTokens(normed, total, weights, ids)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Every kind of scores, with and without residual and biases; two models' sizes on a GPU."""
    shapes = [(1, 64, 8, 2), (3, 96, 12, 3), (2, 160, 33, 4)]
    if device != "cpu":
        shapes += [(rows, 2048, 128, 8) for rows in (1, 4)] + [(1, 2880, 32, 4)]
    for number, (rows, hidden, experts, top_k) in enumerate(shapes):
        # all rows of the router and all tokens have one direction: rounding leaves the order of
        # the experts as it is
        direction = randn(1, hidden, device=device, dtype=torch.float32, seed=9)
        x, residual = (
            randn(rows, hidden, device=device, dtype=dtype, seed=rows + seed, scale=scale)
            + (2 * scale * direction).to(dtype)
            for seed, scale in ((hidden, 1.0), (experts, 3.0))
        )
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(number))
        factors = (order.to(device) + 1) / experts
        router = (direction * (16 / hidden) * factors[:, None]).to(dtype)
        bias = randn(experts, device=device, dtype=dtype, seed=number, scale=0.5)
        biased = number % 2 == 1
        rules = FusedTopkInputs(
            torch.empty(0, experts, device="meta"), None, top_k, SIGMOID if biased else SOFTMAX,
            renormalize=number != 2, scale=1.5,
        )  # fmt: skip
        args = {
            "x": x,
            "residual": None if number == 2 else residual,
            "norm_weight": randn(hidden, device=device, dtype=dtype, seed=hidden) + 1,
            "eps": 1e-5,
            "router": router,
            "rules": rules,
            "router_bias": bias if biased else None,
            "selection_bias": factors.flip(0) * 2 * experts if biased else None,
            "logit_scale": 0.5 if biased else 1.0,
        }
        name = f"{rows}x{hidden}->{top_k} of {experts}" + (" biased" if biased else "")
        writes = ("residual",) if number != 2 else ()
        moved = 4 * nbytes(x) + nbytes(router)
        yield Case(name, args, moved, 2 * rows * hidden * experts, writes=writes)
