// Conversion of normalized activations to 8 bits.
//
// Computes: values = round(y · factor (+ zero-point)), saturated (not where PER_TOKEN: no value
//     exceeds the range)
// Dtypes: float32 to int8, or with FP8 to e4m3
// Layout: registers
// Range: static factor, or PER_TOKEN dynamic scale
// Technique: saturating conversions
// Used by: rmsnorm_quant_permute.cu, rmsnorm_quant_permute_small_m.cu
//
// Macros: ZERO_POINTS (asymmetric int8), PER_TOKEN (dynamic scale: no value exceeds the range),
// FP8.
#pragma once
#include "common/half_types.cuh"

// Products of pairs with one rounding, which equals float32 multiplication and rounding to 16 bits.
__device__ inline u32 mul_pairs(u32 a, u32 b) {
    u32 packed;
    asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(packed) : "r"(a), "r"(b));
    return packed;
}

// Elementwise max(a, |b|) of two pairs, a ≥ 0: bit patterns of non-negative floats sort as
// integers.
__device__ inline u32 max_abs_pairs(u32 a, u32 b) { return __vmaxu2(a, b & 0x7FFF7FFFu); }

// Two values as e4m3, the first in the lower byte.
__device__ inline u32 fp8_pair(float first, float second) {
    u16 packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(second), "f"(first));
    return packed;
}

// y · factor (+ zero-point), clamped, before the conversion to 8 bits.
__device__ inline float scale_to_8bit(float y, float factor, float zero, float qmax) {
#ifdef FP8
    return y * factor;  // the conversion saturates
#else
    // Between 2²³ and 2²⁴ the last bit of a float32 is worth 1: the addition rounds half to even.
    const float MAGIC = 12582912.0f;
    float biased = __fmaf_rn(y, factor, MAGIC);
    if (ZERO_POINTS) biased += zero;
    return PER_TOKEN ? biased : fminf(fmaxf(biased, MAGIC - qmax - ZERO_POINTS), MAGIC + qmax);
#endif
}

// Four scaled values packed as bytes, the first the lowest.
__device__ inline u32 pack_bytes(float a, float b, float c, float d) {
#ifdef FP8
    return fp8_pair(a, b) | fp8_pair(c, d) << 16;
#else
    const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(ab, cd, 0x5410);
#endif
}
