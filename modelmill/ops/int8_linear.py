"""Matrix product with int8 weights, one scale per output channel (W8A16).

Activations stay floating point.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.kernel_support import make_gemm_problem
from modelmill.ops.linear import linear
from modelmill.ops.linear_cases import DECODE_7B_SHAPES, DENSE_SHAPES, dense_args, linear_case
from modelmill.ops.op_cost import gemm_cost

DECLARATION = OpDeclaration(
    problem=make_gemm_problem, operands=("x", "weight", "scale", "bias"), cost=gemm_cost
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}

# Up to this many rows torch's int8 product is faster than one with weights converted to 16 bits,
# which takes twice the memory traffic.
INT8PACK_MM_MAX_ROWS = 4
# torch's int8 kernel works on runs of 32 columns and reads beyond the end of a shorter row.
INT8PACK_MM_COLUMN_MULTIPLE = 32


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute (x · weightᵀ) · scale + bias.

    The product with the integers is computed in x's dtype (small integers are exact in bfloat16 and
    float16). The scale is applied to the float32 sums, then rounded to x's dtype.

    Args:
        x: [T, K], floating point.
        weight: [N, K] int8, or already of x's dtype and padded with zeros along K.
        scale: [N] float32.
        bias: [N] of x's dtype, or None.

    Returns:
        [T, N] of x's dtype.
    """
    if weight.shape[1] > x.shape[-1]:
        x = F.pad(x, (0, weight.shape[1] - x.shape[-1]))
    if weight.dtype is torch.int8 and uses_int8pack_mm(x):
        sums = torch._weight_int8pack_mm(
            x.contiguous(), weight.contiguous(), x.new_ones(weight.shape[0])
        )
    else:
        sums = linear(x, weight.to(x.dtype))
    if bias is None:
        return sums.mul_(scale)  # in float32, rounded where it is stored
    return (sums * scale + bias).to(x.dtype)


def uses_int8pack_mm(x: torch.Tensor) -> bool:
    """Whether x [T, K] is multiplied by torch's own int8 kernel.

    True for a few rows of bfloat16 on a CPU.
    """
    few = x.dim() == 2 and 0 < x.shape[0] <= INT8PACK_MM_MAX_ROWS and x.device.type == "cpu"
    return (
        few
        and x.dtype is torch.bfloat16
        and supports_int8pack_mm(x.shape[1])
        and not x.requires_grad
    )


def supports_int8pack_mm(columns: int) -> bool:
    """Whether torch has such a kernel for this number of columns on this processor."""
    return columns > 0 and columns % INT8PACK_MM_COLUMN_MULTIPLE == 0 and _int8pack_mm_usable()


@functools.cache
def _int8pack_mm_usable() -> bool:
    """Whether torch's private int8 op exists, is vectorized here and gives exact results."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # scalar code, or never measured (arm64)
    x = (torch.arange(64) % 7 - 3).to(torch.bfloat16)[None]
    weight = (torch.arange(192) % 11 - 5).to(torch.int8).view(3, 64)
    try:
        sums = torch._weight_int8pack_mm(x, weight, x.new_ones(3))
    except (AttributeError, RuntimeError, TypeError):
        return False
    # integers below 256: the sums do not depend on the order of addition
    return torch.equal(sums, F.linear(x.float(), weight.float()).to(torch.bfloat16))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight per row: symmetric, round to nearest.

    Returns:
        Codes [N, K] int8 and scales [N] float32; a row of zeros gets scale 1.
    """
    weight32 = weight.float()
    amax = weight32.abs().amax(-1)
    # divide by a tensor: GPUs divide by a Python number as a product with its reciprocal, and the
    # last bit would depend on the device
    scale = amax / torch.full_like(amax, 127.0)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(weight32 / scale[:, None]).clamp(-127, 127).to(torch.int8), scale


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The shapes of linear."""
    shapes = DENSE_SHAPES
    if device != "cpu":
        shapes = [*shapes, *DECODE_7B_SHAPES, (8, 4096, 4096)]
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int, int]], device: str, dtype: torch.dtype, *, gated: bool = False
) -> Iterator[Case]:
    """Cases of (rows, K, columns of the output), with a bias where these are odd."""
    for rows, k, n in shapes:
        x_seed = rows + k + (0 if gated else n)
        args = dense_args(
            rows, k, n, device=device, dtype=dtype, x_seed=x_seed, has_bias=n % 2 == 1, gated=gated
        )
        weight_rows = args["weight"].shape[0]
        weight32 = randn(
            weight_rows, k, device=device, dtype=torch.float32, seed=k + n, scale=k**-0.5
        )
        args["weight"], args["scale"] = quantize(weight32)
        yield linear_case(args, gated=gated)
