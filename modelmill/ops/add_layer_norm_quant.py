"""Residual add and LayerNorm with an 8-bit output, in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.ops import add_layer_norm as plain
from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, nbytes
from modelmill.ops.gelu_quant import forms

TOLERANCE = rms_norm_quant.TOLERANCE


def add_layer_norm_quant(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float,
    kind: torch.dtype, factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """(values [..., H] of ``kind``, scale [...] float32 or None, x + residual) of ``add_layer_norm``'s output.

    factor: [1] float32 or None; rounding as in ``rms_norm_quant``.
    """
    y, total = plain.add_layer_norm(x, residual, weight, bias, eps)
    return *rms_norm_quant.quantized(y, kind, factor, None, None, 8), total


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of add_layer_norm, each kind by token and static."""
    yield from _narrow(plain.cases(device, dtype), device)


def cases_of(shapes: Sequence[tuple[int, int]], device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Of (rows, width), in every form."""
    yield from _narrow(plain.cases_of(shapes, device, dtype), device)


def _narrow(wide: Iterator[Case], device: str) -> Iterator[Case]:
    for case in wide:
        x = case.args["x"]
        for name, form in forms(device):
            yield Case(f"{case.name}-{name}", case.args | form, 3 * nbytes(x) + x.numel())
