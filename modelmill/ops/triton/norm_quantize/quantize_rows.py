"""Quantization of rows to 8 bits in a kernel, bit-identical to ``rms_norm_quant.quantize_rows``.

Computes: the scale of a row and its values in 8 bits
Dtypes: float32 to int8 or e4m3
Layout: registers
Range: one row per program
Technique: round half to even
Used by: gelu_quant.py, layer_norm_quant.py
"""

from __future__ import annotations

import triton
import triton.language as tl

_MIN_AMAX = tl.constexpr(1e-6)
_ROUNDING_MAGIC_NUMBER = tl.constexpr(12582912.0)  # 1.5 · 2²³


@triton.jit
def store_scales_and_invert(amax, scale_at, row_valid, IS_INT8: tl.constexpr):
    """Factors of rows with maxima amax [R]; stores their scales for valid rows."""
    amax = tl.maximum(amax, _MIN_AMAX)
    quant_max = amax * 0.0 + (127.0 if IS_INT8 else 448.0)
    tl.store(scale_at, tl.div_rn(amax, quant_max), mask=row_valid)
    return tl.div_rn(quant_max, amax)


@triton.jit
def scale_and_round_8bit(y, factor, IS_INT8: tl.constexpr, DYNAMIC: tl.constexpr):
    """Compute y · factor (y float32) as 8-bit values, to be cast at the store.

    DYNAMIC: factor is the row's own, so that no clamping is needed.
    """
    quant_max: tl.constexpr = 127.0 if IS_INT8 else 448.0
    y *= factor
    if IS_INT8:
        # from 2²³ to 2²⁴ float32 represents exactly the integers: adding 1.5 · 2²³ rounds half to
        # even, and the last byte of the bits is the int8
        y += _ROUNDING_MAGIC_NUMBER
        if not DYNAMIC:
            y = tl.minimum(
                tl.maximum(y, _ROUNDING_MAGIC_NUMBER - quant_max),
                _ROUNDING_MAGIC_NUMBER + quant_max,
            )
        return y.to(tl.int32, bitcast=True)
    else:  # noqa: RET505  Triton compiles code after a return too
        return y if DYNAMIC else tl.minimum(tl.maximum(y, -quant_max), quant_max)
