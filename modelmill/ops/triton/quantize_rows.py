"""Rows to 8 bits inside a kernel, with the bits of ``ops.rms_norm_quant.quantized``."""

from __future__ import annotations

import triton
import triton.language as tl

_MIN_AMAX = tl.constexpr(1e-6)
_ROUND_TO_INT = tl.constexpr(12582912.0)  # 1.5 · 2²³


@triton.jit
def row_inv_scale(amax, scale_at, there, WHOLE: tl.constexpr):
    """What rows of the largest magnitudes amax [R] are multiplied by; their scales are stored where
    there are rows.
    """
    amax = tl.maximum(amax, _MIN_AMAX)
    most = amax * 0.0 + (127.0 if WHOLE else 448.0)
    tl.store(scale_at, tl.div_rn(amax, most), mask=there)
    return tl.div_rn(most, amax)


@triton.jit
def round_8bit(y, factor, WHOLE: tl.constexpr, TOKEN: tl.constexpr):
    """y float32 → y · factor as 8-bit values, to be cast to their type at the store.

    TOKEN: by the row's own factor.
    """
    most: tl.constexpr = 127.0 if WHOLE else 448.0
    y *= factor
    if WHOLE:
        # from 2²³ to 2²⁴ a float32 is a whole number, with 1 in its last bit: a value put there is
        # rounded half to even, and the last byte of its bits is the int8
        y += _ROUND_TO_INT
        if not TOKEN:
            y = tl.minimum(tl.maximum(y, _ROUND_TO_INT - most), _ROUND_TO_INT + most)
        return y.to(tl.int32, bitcast=True)
    else:  # noqa: RET505  what stands after a return is compiled as well
        return y if TOKEN else tl.minimum(tl.maximum(y, -most), most)
