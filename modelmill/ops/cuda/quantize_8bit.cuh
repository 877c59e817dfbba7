// Normed values to 8 bits: int8, or with the macro FP8 e4m3. SHIFT: zero-points; TOKEN: a factor that no value is too
// large for.
#pragma once
#include "half_types.cuh"

// Products of pairs, rounded once: of two 16-bit numbers that is what float32 and a rounding give.
__device__ inline u32 times(u32 a, u32 b) {
    u32 both;
    asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// The larger sizes of two pairs: without their signs, numbers are in the order of their bits.
__device__ inline u32 larger_sizes(u32 a, u32 b) {
    return __vmaxu2(a, b & 0x7FFF7FFFu);
}

// Two values as e4m3, the first in the lower byte.
__device__ inline u32 fp8_pair(float first, float second) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}

// A value times its factor, before it becomes a byte.
__device__ inline float scaled(float y, float factor, float zero, float most) {
#ifdef FP8
    return y * factor; // its ends are those of the type, at which the conversion holds it
#else
    // From 2²³ to 2²⁴ a float32 is a whole number, with 1 in its last bit: what is put there is rounded half to even.
    const float whole = 12582912.0f;
    float raised = __fmaf_rn(y, factor, whole);
    if (SHIFT) raised += zero;
    return TOKEN ? raised : fminf(fmaxf(raised, whole - most - SHIFT), whole + most);
#endif
}

// Four scaled values as bytes, the first the lowest.
__device__ inline u32 bytes(float a, float b, float c, float d) {
#ifdef FP8
    return fp8_pair(a, b) | fp8_pair(c, d) << 16;
#else
    const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(ab, cd, 0x5410);
#endif
}
