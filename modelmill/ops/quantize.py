"""Activations quantized to 8 bits where no norm does it: per-token or static scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.declaration import OpDeclaration

DECLARATION = OpDeclaration()

TOLERANCE = rms_norm_quant.TOLERANCE


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype,
    inv_scale: torch.Tensor | None = None,
    zero_point: torch.Tensor | None = None,
    perm: torch.Tensor | None = None,
    bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize x [..., H] float32, float16 or bfloat16; arguments as in ``rms_norm_quant``.

    Returns:
        (values [..., N] of ``dtype``, scale [...] float32 or None).
    """
    return rms_norm_quant.quantize_rows(x, dtype, inv_scale, zero_point, perm, bits)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of rms_norm_quant without the norm."""
    shapes = rms_norm_quant.SHAPES if device != "cpu" else ((1, 64), (3, 576), (7, 100), (5, 8193))
    for number, (rows, width) in enumerate(shapes):
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width)
        for name, args in rms_norm_quant.quant_modes(width, device, number):
            moved = nbytes(x) + rows * (args["perm"].numel() if "perm" in args else width)
            yield Case(f"{rows}x{width}-{name}", {"x": x, **args}, moved)
