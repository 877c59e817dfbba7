"""The router of a mixture of experts and the choice of each token's experts in one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.fused_topk import FusedTopkInputs, fused_topk
from modelmill.ops.router_gemm import router_gemm


class RouterTopkInputs(NamedTuple):
    """Activations, the router and how experts are chosen.

    Attributes:
        x: [T, H], floating point.
        weight: [E, H] of the router.
        bias: as all that follows, see ``FusedTopkInputs``.
        top_k: experts of a token.
        sigmoid: what a score is.
        renormalize: whether the weights of a token sum to 1.
        scale: factor of the weights.
        groups: of experts.
        top_groups: groups of a token.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    sigmoid: bool = False
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


DECLARATION = OpDeclaration(
    fuses=("router_gemm", "fused_topk"), optional=True, inputs=RouterTopkInputs
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}


def router_topk(inputs: RouterTopkInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``fused_topk`` of ``router_gemm``.

    Returns:
        Weights [T, top_k] float32 and ids [T, top_k] int32.
    """
    return fused_topk(FusedTopkInputs(router_gemm(inputs.x, inputs.weight), *inputs[2:]))


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """One token and several; softmax and sigmoid; Qwen3-30B-A3B's router on a GPU."""
    shapes: list[tuple[int, int, int, int, dict[str, Any]]] = [
        (1, 96, 8, 2, {}),
        (3, 67, 20, 4, {"sigmoid": True, "scale": 2.5, "biased": True}),
    ]
    if device != "cpu":
        shapes += [(rows, 2048, 128, 8, {"renormalize": False}) for rows in (1, 16)]
    for rows, hidden, experts, top_k, switches in shapes:
        biased = switches.get("biased", False)
        rest = {name: value for name, value in switches.items() if name != "biased"}
        x = randn(rows, hidden, device=device, dtype=dtype, seed=rows)
        weight = randn(
            experts, hidden, device=device, dtype=dtype, seed=experts, scale=2 * hidden**-0.5
        )
        bias = randn(experts, device=device, dtype=torch.float32, seed=experts) if biased else None
        args = RouterTopkInputs(x, weight, bias, top_k, **rest)._asdict()
        moved = nbytes(x, weight, bias) + 8 * rows * top_k
        yield Case(f"{rows}x{hidden}->{experts}->{top_k}", args, moved, 2 * x.numel() * experts)
