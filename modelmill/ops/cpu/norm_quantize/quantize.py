"""Activations to int8 by rows in C++ (quantize.cpp)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.quantize import quantize

available = build.available


def supports(x: torch.Tensor, spec: ActQuantSpec) -> bool:  # noqa: ARG001
    """int8 of 8 bits in the order given, scaled by token or by one factor."""
    dtype, inv_scale, zero_point, perm, bits = spec
    plain = dtype is torch.int8 and bits == 8 and zero_point is None and perm is None
    return plain and (
        inv_scale is None or (inv_scale.numel() == 1 and inv_scale.dtype is torch.float32)
    )


def run(x: torch.Tensor, spec: ActQuantSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference, bit for bit."""
    if x.dtype not in build.DTYPES or not supports(x, spec) or not x.numel():
        return quantize(x, spec)
    inv_scale = spec.inv_scale
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.int8)
    scale = None if inv_scale is not None else torch.empty(x.shape[:-1], dtype=torch.float32)
    width = x.shape[-1]
    factor = None if inv_scale is None else inv_scale.data_ptr()
    scale_out = None if scale is None else scale.data_ptr()
    _kernel()(
        out.data_ptr(),
        scale_out,
        x.data_ptr(),
        factor,
        x.numel() // width,
        width,
        build.DTYPES[x.dtype],
    )
    return out, scale


@functools.cache
def _kernel() -> Callable[..., Any]:
    return build.function("quantize_int8", "ppppqqi")
