"""GELU whose output is 8-bit, scaled by token or by calibration: what the second half of an MLP
multiplies with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from modelmill.ops import rms_norm_quant
from modelmill.ops.case import Case, nbytes, randn
from modelmill.ops.gelu import gelu

TOLERANCE = rms_norm_quant.TOLERANCE


def gelu_quant(
    x: torch.Tensor, dtype: torch.dtype, inv_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values [..., H] of ``dtype``, scale [...] float32 or None) of y = gelu(x), rounded to x's
    dtype.

    x: [..., H] float32/16/bf16. inv_scale: [1] float32 or None; both as in ``rms_norm_quant``.
    """
    return rms_norm_quant.quantize_rows(gelu(x), dtype, inv_scale, None, None, 8)


def cases(device: str, dtype: torch.dtype) -> Iterator[Case]:
    """Both kinds, by token and static, odd and usual widths."""
    shapes = ((1, 64), (3, 576), (7, 101)) if device == "cpu" else ((1, 64), (7, 101), (4096, 5120))
    yield from cases_for_shapes(shapes, device, dtype)


def cases_for_shapes(
    shapes: Sequence[tuple[int, int]], device: str, dtype: torch.dtype
) -> Iterator[Case]:
    """Of (rows, width), in every form."""
    for rows, width in shapes:
        x = randn(rows, width, device=device, dtype=dtype, seed=rows * width, scale=2.0)
        for name, form in quant_modes(device):
            yield Case(f"{rows}x{width}-{name}", {"x": x, **form}, nbytes(x) + rows * width)


def quant_modes(device: str) -> Iterator[tuple[str, dict[str, object]]]:
    """(name, arguments) of each way to round."""
    factor = torch.full((1,), 20.0, device=device)
    for name, kind in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        yield f"{name}-token", {"dtype": kind}
        yield f"{name}-static", {"dtype": kind, "inv_scale": factor}
