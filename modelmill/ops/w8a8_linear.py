"""Matrix product of int8 activations and int8 weights: exact int32 sums, scaled in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from modelmill.ops.case import Case, randn
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.int8_linear import quantize
from modelmill.ops.kernel_support import GemmProblem, make_gemm_problem
from modelmill.ops.linear_cases import linear_case
from modelmill.ops.op_cost import gemm_cost
from modelmill.ops.quant_types import exact_int_matmul, quantize_per_row

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Linear8BitInputs(NamedTuple):
    """Activations and a weight in 8 bits with their scales: operands of the 8-bit products.

    Attributes:
        x: [T, K] int8 or e4m3; of ``fp8_linear`` also floating point.
        weight: [N, K] of x's 8-bit dtype; the reference of ``w8a8_linear`` also takes the same
            integers as float32.
        scale: [N] float32.
        x_scale: [T] or [1] float32; None for a floating-point x.
        dtype: dtype of the output.
        bias: [N] or None.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    x_scale: torch.Tensor | None
    dtype: torch.dtype
    bias: torch.Tensor | None = None


def make_linear_8bit_problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    x_scale: torch.Tensor | None,  # noqa: ARG001  in the order of the operands
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> GemmProblem:
    """The product of ``Linear8BitInputs``."""
    return make_gemm_problem(x, weight, scale, bias, out_dtype=dtype)


DECLARATION = OpDeclaration(
    inputs=Linear8BitInputs, problem=make_linear_8bit_problem, per_call="x_scale", cost=gemm_cost
)


def w8a8_linear(inputs: Linear8BitInputs) -> torch.Tensor:
    """Compute (Σ x · w) · x_scale · scale + bias, rounded to ``dtype`` once.

    The sums are integers, exact up to 2³¹. All further arithmetic is float32 (float64 if the scales
    are).

    Returns:
        [T, N] of ``dtype``.
    """
    x, weight, scale, x_scale, dtype, bias = inputs
    assert x_scale is not None, "int8 activations have a scale"
    out = exact_int_matmul(x, weight).to(scale.dtype) * x_scale[:, None] * scale
    if bias is not None:
        out = out + bias
    return out.to(dtype)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill; scales per token, row or tensor; odd widths; outlier channels."""
    for rows, k, n in case_shapes(device):
        yield linear_case(case_args(random_inputs, rows, k, n, device=device, dtype=dtype))


def case_shapes(device: str) -> list[tuple[int, int, int]]:
    """(rows, K, N) of the cases of the 8-bit products; the 7B shapes only on a GPU."""
    shapes = [(1, 576, 1536), (5, 100, 33), (33, 576, 96), (1, 1536, 576), (2, 65, 7)]
    shapes += [(7, 64, 48), (20, 33, 50)]
    if device != "cpu":
        shapes += [(1, 4096, 12288), (1, 4096, 4096), (1, 11008, 4096), (8, 4096, 4096)]
        shapes += [(64, 4096, 4096), (1024, 4096, 12288), (1000, 4096, 4096)]
    return shapes


def case_args(
    make_inputs: Callable[..., dict[str, Any]],
    rows: int,
    k: int,
    n: int,
    *,
    device: str,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """All arguments of a case, of which ``make_inputs`` makes x, the weight and their scales."""
    args = make_inputs(rows, k, n, device=device, per_token=rows != 5, per_channel=rows != 33)
    bias = randn(n, device=device, dtype=dtype, seed=n) if n % 2 else None
    return args | {"dtype": dtype, "bias": bias}


def random_inputs(
    rows: int,
    k: int,
    n: int,
    *,
    device: str,
    per_token: bool = True,
    per_channel: bool = True,
    outliers: float = 30.0,
) -> dict[str, Any]:
    """Seeded x, weight and their scales; channels 0, 40, 80 … of x are scaled by ``outliers``."""
    x = randn(rows, k, device="cpu", dtype=torch.float32, seed=rows + k)
    x[:, ::40] *= outliers
    weight32 = randn(n, k, device="cpu", dtype=torch.float32, seed=n, scale=k**-0.5)
    weight = quantize(weight32) if per_channel else None
    return case_args_with_quantized_x(
        x if per_token else x.flatten(),
        weight or quantize_per_row(weight32.flatten(), torch.int8),
        (rows, k, n),
        device,
    )


def case_args_with_quantized_x(
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int],
    device: str,
) -> dict[str, Any]:
    """Values of x and of a weight in the same 8 bits, with their scales, on a device.

    Args:
        x: [T, K] for a scale of each token, [T · K] for one of all; float32.
        weight: values and scales; one scale serves all N rows.
        sizes: (T, K, N).
        device: of the result.
    """
    rows, k, n = sizes
    values, x_scale = quantize_per_row(x, weight[0].dtype)
    tensors = {"x": values.view(rows, k), "weight": weight[0].view(n, k)}
    scale = weight[1].reshape(-1).expand(n).contiguous()
    tensors |= {"scale": scale, "x_scale": x_scale.reshape(-1)}
    return {name: tensor.to(device) for name, tensor in tensors.items()}
