"""Activations to int8 by rows in C++ (quantize.cpp)."""

from __future__ import annotations

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.quant_types import ActQuantSpec
from modelmill.ops.row_op_support import RowOpSupportRange

unavailable_reason = build.unavailable_reason
_kernel = build.make_lazy_function_loader("quantize_int8", "ppppqqi")
SUPPORTED_PROBLEMS = (
    RowOpSupportRange(
        dtypes=tuple(build.DTYPE_CODES),
        out_dtypes=(torch.int8,),
        max_factors=1,
        packed_dtypes=True,
        plain_spec=True,
    ),
)


def run(x: torch.Tensor, spec: ActQuantSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference, bit for bit."""
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
        build.DTYPE_CODES[x.dtype],
    )
    return out, scale
