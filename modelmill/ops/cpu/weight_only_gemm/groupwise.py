"""Products with weights in groups along K, in C++ (groupwise.h). Activations stay as they are.

The codes become floats in registers, so that only half a byte or a byte a weight comes from memory.
Many rows of bfloat16: a slice of the weights is rounded to bfloat16, then torch's blocked product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from modelmill.ops.cpu.common import build
from modelmill.ops.cpu.common.gemm import GemmFunction, load_gemm_function
from modelmill.ops.cpu.gemm_16bit.linear import prefers_cpp_kernel
from modelmill.ops.groupwise import PACK_COLUMNS, GroupwiseLinearInputs

_DTYPE_CODES = build.DTYPE_CODES
# ScaleType of groupwise.h.
SCALE_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.uint8: 2}
# Weights widened at a time: the copies stay in the cache until the product has read them.
DEQUANT_SLICE_BYTES = 2 << 20


class GroupwiseLinearKernels:
    """The C functions of one width of codes, and the reference that serves what they do not."""

    def __init__(
        self,
        kernel: str,
        dequant_kernel: str,
        reference: Callable[[GroupwiseLinearInputs], torch.Tensor],
    ) -> None:
        self._gemm = GemmFunction(kernel, "ppppppqqqqii")
        self._dequant_name, self._reference = dequant_kernel, reference

    def run(self, inputs: GroupwiseLinearInputs) -> torch.Tensor:
        """As the reference, but that many rows of bfloat16 meet weights rounded to bfloat16."""
        x, weight, scale, offset, group, bias = inputs
        dtype = x.dtype
        if (
            dtype not in _DTYPE_CODES
            or x.dim() != 2
            or group % PACK_COLUMNS
            or not _supports_weight(weight, scale, offset)
        ):
            return self._reference(inputs)
        if bias is not None and not (bias.is_contiguous() and bias.dtype is dtype):
            return self._reference(inputs)
        x = x.contiguous()
        rows, k = x.shape
        if not prefers_cpp_kernel(dtype, rows, k):
            return self._dequantized_matmul(inputs._replace(x=x))
        sizes = (rows, k, weight.shape[0], group)
        kind = SCALE_DTYPE_CODES[scale.dtype]
        return self._gemm((x, weight, scale, offset, bias), sizes, dtype, kind)

    def _dequantized_matmul(self, inputs: GroupwiseLinearInputs) -> torch.Tensor:
        """X [T, K] times slices of the widened weight."""
        x, weight, scale, offset, group, bias = inputs
        n, k = weight.shape[0], x.shape[1]
        step = min(n, max(256, DEQUANT_SLICE_BYTES // max(k, 1)))
        widen = load_gemm_function(self._dequant_name, "ppppqqqii")
        wide = torch.empty(step, k, dtype=x.dtype)
        out = torch.empty(x.shape[0], n, dtype=x.dtype)
        for first in range(0, n, step):
            count = min(step, n - first)
            parts = [
                None if t is None else t[first : first + count].data_ptr()
                for t in (weight, scale, offset)
            ]
            widen(
                wide.data_ptr(),
                *parts,
                k,
                count,
                group,
                _DTYPE_CODES[x.dtype],
                SCALE_DTYPE_CODES[scale.dtype],
            )
            torch.mm(x, wide[:count].t(), out=out[:, first : first + count])
        return out if bias is None else out.add_(bias)


def _supports_weight(
    weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> bool:
    grids = (scale,) if offset is None else (scale, offset)
    return (
        weight.is_contiguous()
        and scale.dtype in SCALE_DTYPE_CODES
        and all(t.dtype is scale.dtype and t.is_contiguous() for t in grids)
    )
