"""The experts of a mixture for all tokens: grouped products with SwiGLU between them.

Weights of all experts are stacked. Only those of the experts that have tokens need be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.silu_mul import silu_mul


class FusedMoEInputs(NamedTuple):
    """Activations, routing and the weights of all experts.

    Attributes:
        x: [T, H], floating point.
        topk_weights: [T, top_k] float32.
        topk_ids: [T, top_k] int32, each below E.
        gate_up: [E, 2·I, row]: the matrices of the first product, gate above up.
        down: [E, H, row]: those of the second.
        shared: [T, H] of x's dtype, added to the sum of a token's experts, or None.
        gate_up_scale: of quantized weights, [E, 2·I] or in groups [E, 2·I, ⌈H/group⌉].
        down_scale: [E, H] or [E, H, ⌈I/group⌉].
        gate_up_offset: as the scale, or None (symmetric).
        down_offset: as the scale, or None.
        group: columns that share a scale; 0 without groups.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: torch.Tensor | None = None
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None
    gate_up_offset: torch.Tensor | None = None
    down_offset: torch.Tensor | None = None
    group: int = 0


DECLARATION = OpDeclaration(inputs=FusedMoEInputs)

TOLERANCE = {torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}

Dequantize = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int, torch.dtype], torch.Tensor
]
"""(weight, scale, offset, group, columns, dtype) of one expert → its matrix of that dtype."""


def fused_moe(inputs: FusedMoEInputs) -> torch.Tensor:
    """Compute Σ topk_weights · down(silu(gate) · up) over the experts of each token, plus shared.

    Products are rounded to x's dtype, as single ops would do, and summed in float32.

    Returns:
        [T, H] of x's dtype.
    """
    return experts_reference(inputs, lambda weight, *_: weight)


def experts_reference(
    inputs: FusedMoEInputs,
    dequantize: Dequantize,
    quantize: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The op with the weights of each expert dequantized; every expert computes every token.

    Sizes do not depend on the routing, so that a CUDA graph can contain it.

    Args:
        inputs: of the op.
        dequantize: an expert's matrix of its stored tensors.
        quantize: rounds the input of a product, or None.
    """
    x, weights, ids = inputs.x, inputs.topk_weights, inputs.topk_ids
    wide = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)

    def matrix(name: str, expert: int, columns: int) -> torch.Tensor:
        grids = [getattr(inputs, name + suffix) for suffix in ("_scale", "_offset")]
        scale, offset = (None if grid is None else grid[expert] for grid in grids)
        weight = getattr(inputs, name)[expert]
        return dequantize(weight, scale, offset, inputs.group, columns, wide).to(wide)

    inner = inputs.gate_up.shape[1] // 2
    rounded = x if quantize is None else quantize(x)
    for expert in range(len(inputs.gate_up)):
        gate_up = (rounded.to(wide) @ matrix("gate_up", expert, x.shape[1]).T).to(x.dtype)
        down, product = matrix("down", expert, inner), silu_mul(gate_up)
        product = product if quantize is None else quantize(product)
        out = (product.to(wide) @ down.T).to(x.dtype)
        total += out.to(wide) * (weights * (ids == expert)).sum(1, keepdim=True).to(wide)
    if inputs.shared is not None:
        total += inputs.shared.to(wide)
    return total.to(x.dtype)


Shape = tuple[int, int, int, int, int]  # tokens, hidden, inner, experts, top_k
SMALL_SHAPES: list[Shape] = [(1, 64, 32, 8, 2), (5, 64, 32, 4, 3), (21, 96, 64, 3, 2)]
A3B_SHAPES: list[Shape] = [(rows, 2048, 768, 128, 8) for rows in (1, 8, 64, 1024)]


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill, with and without a shared expert; Qwen3-30B-A3B's on a GPU."""
    for shape in shapes(device):
        weights = {
            name: randn(experts, n, k, device=device, dtype=dtype, seed=n, scale=k**-0.5)
            for name, experts, n, k in weight_shapes(shape)
        }
        yield experts_case(shape, device, dtype, weights)


def shapes(device: str) -> list[Shape]:
    """The shapes of the cases on a device."""
    return SMALL_SHAPES if device == "cpu" else [*SMALL_SHAPES, *A3B_SHAPES]


def weight_shapes(shape: Shape) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, experts, rows and columns of the weights of both products."""
    _, hidden, inner, experts, _ = shape
    yield "gate_up", experts, 2 * inner, hidden
    yield "down", experts, hidden, inner


def experts_case(
    shape: Shape, device: str, dtype: torch.dtype, weights: dict[str, Any], group: int = 0
) -> Case:
    """A case with these weights; an odd number of tokens has a shared expert's output."""
    tokens, hidden, inner, experts, top_k = shape
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    topk_weights, ids = scores.topk(top_k, dim=-1)
    inputs = FusedMoEInputs(
        randn(tokens, hidden, device=device, dtype=dtype, seed=tokens + hidden),
        (topk_weights / topk_weights.sum(-1, keepdim=True)).to(device),
        ids.int().to(device),
        shared=(
            randn(tokens, hidden, device=device, dtype=dtype, seed=5)
            if tokens % 2 and tokens > 1
            else None
        ),
        **weights,
        group=group,
    )
    tensors = [value for value in weights.values() if value is not None]
    read = nbytes(*tensors) * len(ids.unique()) // experts
    moved = read + nbytes(inputs.x, inputs.shared) + nbytes(inputs.x)
    suffix = f" g{group}" if group else ""
    name = f"{tokens}x{hidden}->2x{inner} top {top_k} of {experts}{suffix}"
    return Case(name, inputs._asdict(), moved, 6 * tokens * top_k * hidden * inner)
