"""Residual add and LayerNorm with an 8-bit output, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.ops import add_layer_norm as plain
from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, nbytes
from modelmill.ops.gelu_quant import quant_modes

TOLERANCE = rms_norm_quant.TOLERANCE


def add_layer_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    dtype: torch.dtype, inv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(values [..., H] of ``dtype``, scale [...] float32 or None, x + residual) of
    ``add_layer_norm``'s output.

    inv_scale: [1] float32 or None; rounding as in ``rms_norm_quant``.
    """
    y, total = plain.add_layer_norm(x, residual, weight, bias, eps)
    return *rms_norm_quant.quantize_rows(y, dtype, inv_scale, None, None, 8), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of add_layer_norm, each kind by token and static."""
    yield from _narrow(plain.cases(device, dtype), device)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Of (rows, width), in every form."""
    yield from _narrow(plain.cases_for_shapes(shapes, device, dtype), device)


def _narrow(wide: Iterator[Case], device: str) -> Iterator[Case]:
    for case in wide:
        x = case.args["x"]
        for name, form in quant_modes(device):
            yield Case(f"{case.name}-{name}", case.args | form, 3 * nbytes(x) + x.numel())
