"""A row to 8 bits inside a kernel, with the bits of ``ops.rms_norm_quant.quantized``."""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(1e-6)
_WHOLE = tl.constexpr(12582912.0)  # 1.5 · 2²³


@triton.jit
def rounded8(y, scale_ptr, factor, WHOLE: tl.constexpr, TOKEN: tl.constexpr):
    """y, one row in float32 → its 8-bit values, to be cast to their type at the store.

    TOKEN: with the row's own scale, which is stored at ``scale_ptr``; otherwise times ``factor``. WHOLE: int8.
    """
    most: tl.constexpr = 127.0 if WHOLE else 448.0
    if TOKEN:
        amax = tl.maximum(tl.max(tl.abs(y), axis=0), _LEAST)
        largest = amax * 0.0 + most
        factor = tl.div_rn(largest, amax)
        tl.store(scale_ptr, tl.div_rn(amax, largest))
    y *= factor
    if WHOLE:
        # from 2²³ to 2²⁴ a float32 is a whole number, with 1 in its last bit: a value put there is rounded half to
        # even, and the last byte of its bits is the int8
        y += _WHOLE
        if not TOKEN:
            y = tl.minimum(tl.maximum(y, _WHOLE - most), _WHOLE + most)
        return y.to(tl.int32, bitcast=True)
    else:  # noqa: RET505  what stands after a return is compiled as well
        return y if TOKEN else tl.minimum(tl.maximum(y, -most), most)
