"""Conversions between 8-bit and wider values in registers.

Computes: int8 and e4m3 as float16 or float32; scales of 8-bit values and their rounding; log2
Dtypes: int8, e4m3, float16 and float32; other types pass unchanged or are widened
Layout: elementwise; pairs of 8-bit values in int16
Range: any shape
Technique: byte permutations and packed conversions as inline PTX; casts in the interpreter
Used by: latent_rope_cache.py, linear.py, moe_decode.py, paged_decode.py, paged_latent.py,
    paged_prefill.py, rope_cache.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelmill.ops.triton.common.device import INTERPRETED

_ASSEMBLY = tl.constexpr(not INTERPRETED)
_MIN_AMAX = tl.constexpr(1e-6)


def _int8_to_float16_asm(first: str, second: str) -> str:
    """PTX that converts four int8 to two pairs of float16 (see ``widen_8bit_to_float16``).

    first, second: selectors of prmt, the two bytes of each pair.
    """
    return f"""{{
    .reg .b32 u, c;
    xor.b32 u, $2, 0x80808080;
    mov.b32 c, 0x64806480;
    prmt.b32 $0, u, 0x64646464, {first};
    prmt.b32 $1, u, 0x64646464, {second};
    sub.rn.f16x2 $0, $0, c;
    sub.rn.f16x2 $1, $1, c;
    }}"""


_INT8_TO_FLOAT16_ASM = tl.constexpr(_int8_to_float16_asm("0x4140", "0x4342"))
_INT8_PAIRS_TO_FLOAT16_ASM = tl.constexpr(_int8_to_float16_asm("0x4240", "0x4341"))
_FP8_PAIRS_TO_FLOAT16_ASM = tl.constexpr("""{
    .reg .b32 u;
    .reg .b16 a, b;
    prmt.b32 u, $2, 0, 0x3120;
    mov.b32 {a, b}, u;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
    }""")
# a byte b with its sign bit flipped, combined with the exponent of 2²³, reads as 2²³ + 128 + b
_INT8_TO_FLOAT32_ASM = tl.constexpr("""{
    .reg .b32 u, a<4>;
    xor.b32 u, $4, 0x80808080;
    prmt.b32 a0, u, 0x4B000000, 0x7440;
    prmt.b32 a1, u, 0x4B000000, 0x7441;
    prmt.b32 a2, u, 0x4B000000, 0x7442;
    prmt.b32 a3, u, 0x4B000000, 0x7443;
    add.f32 $0, a0, 0fCB000080;
    add.f32 $1, a1, 0fCB000080;
    add.f32 $2, a2, 0fCB000080;
    add.f32 $3, a3, 0fCB000080;
    }""")


@triton.jit
def widen_8bit_to_float16(x):
    """Convert int8 or fp8 (e4m3) to float16, exactly; other types are returned unchanged.

    An int8 b with its sign bit flipped, combined with the exponent of 2¹⁰, reads as the float16 2¹⁰
    + 128 + b: less than a quarter of the instructions that ptxas generates. fp8 has its own
    instruction.
    """
    if x.dtype == tl.int8:
        if _ASSEMBLY:
            return tl.inline_asm_elementwise(
                _INT8_TO_FLOAT16_ASM, "=r,=r,r", args=[x], dtype=tl.float16, is_pure=True, pack=4
            )
        else:  # noqa: RET505  Triton compiles code after a return too
            return x.to(tl.float16)
    elif x.dtype == tl.float8e4nv:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def unpack_8bit_pair_to_float16(pair, dtype: tl.constexpr):
    """Unpack int16 that hold two values of an 8-bit ``dtype`` to (first, second) as float16.

    A matrix in shared memory can be read transposed in units of 16 bits, not of 8.
    """
    if _ASSEMBLY:
        asm: tl.constexpr = (
            _INT8_PAIRS_TO_FLOAT16_ASM if dtype == tl.int8 else _FP8_PAIRS_TO_FLOAT16_ASM
        )
        return tl.inline_asm_elementwise(
            asm, "=r,=r,r", args=[pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    first, second = pair.to(tl.int8), (pair >> 8).to(tl.int8)
    return first.to(dtype, bitcast=True).to(tl.float16), second.to(dtype, bitcast=True).to(
        tl.float16
    )


@triton.jit
def to_float32(x):
    """Convert to float32; int8 as in ``widen_8bit_to_float16``, with the exponent of 2²³."""
    if x.dtype == tl.int8 and _ASSEMBLY:
        return tl.inline_asm_elementwise(
            _INT8_TO_FLOAT32_ASM, "=r,=r,=r,=r,r", args=[x], dtype=tl.float32, is_pure=True, pack=4
        )
    else:  # noqa: RET505
        return x.to(tl.float32)


@triton.jit
def int8_to_float32(x):
    """Convert int8 to float32 without the slow conversion unit, not in the interpreter."""
    return tl.inline_asm_elementwise(
        _INT8_TO_FLOAT32_ASM, "=f,=f,=f,=f,r", args=[x], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def scale_to_unit_float16(q):
    """Scale q to −1 … 1 as float16, so that it cannot overflow; returns (q, factor)."""
    q = q.to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(q)), 1.0e-30)
    return (q / amax).to(tl.float16), amax


@triton.jit
def log2(x):
    """Base-2 logarithm of positive normal float32, with the hardware instruction's error (2⁻²²)."""
    if _ASSEMBLY:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", args=[x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.log2(x)


@triton.jit
def amax_to_scale(amax, LARGEST: tl.constexpr):
    """The float32 scale for values up to ``amax``, as in ``quant_types.quantize_per_row``."""
    return tl.div_rn(tl.maximum(amax, _MIN_AMAX), tl.full(amax.shape, LARGEST, tl.float32))


@triton.jit
def round_to_dtype(x, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """Round float32 x, already scaled, to the 8-bit ``dtype``: half to even, clamped."""
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    if dtype == tl.int8:
        # Beyond 2²³ a float32 has no fraction left: adding 1.5 · 2²³ rounds, half to even.
        x = (x + 12582912.0) - 12582912.0
    return x.to(dtype)
