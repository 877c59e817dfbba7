"""SwiGLU's gate with an 8-bit output: what down_proj multiplies with, scaled by token or by
calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.silu_mul import silu_mul

# In steps of the 8-bit type: the gate is rounded to x's dtype once or twice.
TOLERANCE = rms_norm_quant.TOLERANCE


def silu_mul_quant(
    gate_up: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values [T, I] of ``dtype``, scale [T] float32 or None) of y = silu_mul(gate_up), rounded to
    its dtype.

    gate_up: [T, 2·I] float. dtype: torch.int8 or torch.float8_e4m3fn. inv_scale: [1] float32, what
    y is multiplied by before it is rounded (static); None: the token's own, and the scale that
    undoes it, as rms_norm_quant has them.
    """
    return rms_norm_quant.quantize_rows(silu_mul(gate_up), dtype, inv_scale, None, None, 8)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Decode and prefill rows of small and 7B widths, odd ones; both types, static and by token."""
    shapes = [(1, 1536), (5, 101), (3, 8)] + (
        [] if device == "cpu" else [(1, 11008), (64, 11008), (1000, 11008)]
    )
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Of (rows, outputs), in every form."""
    for rows, inner in shapes:
        x = randn(rows, 2 * inner, device=device, dtype=dtype, seed=rows + inner, scale=2.0)
        for kind in (torch.int8, torch.float8_e4m3fn):
            for static in (False, True):
                factor = torch.full((1,), 9.5, device=device) if static else None
                name = f"{rows}x{inner}-{'int8' if kind is torch.int8 else 'fp8'}-{'static' if static else 'token'}"  # noqa: E501
                yield Case(
                    name,
                    {"gate_up": x, "dtype": kind, "inv_scale": factor},
                    nbytes(x) + rows * inner,
                )
