// 16-bit types.
//
// Computes: conversions between 16-bit types and float32, exp2, SiLU and a warp's sum and maximum
// Range: bfloat16, with -DHALF float16
// Technique: cvt and ex2 instructions, warp shuffles
// Used by: add_rms_norm_router.cu, dequant_int8.cuh, mma.cuh, moe_combine.cu, paged_decode.cuh,
//     paged_decode16.cu, quantize_8bit.cuh, rptq_quant.cu, weight_only_types.cuh, wgmma.cuh
#pragma once
#include "common/hopper.cuh"

#ifdef HALF
#    define TYPE "f16"
#else
#    define TYPE "bf16"
#endif

// exponentials are powers of two: e^x = 2^(x · LOG2E)
constexpr float LOG2E = 1.4426950408889634f;

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// float16 to float32, whatever the kernel's type is.
__device__ inline float half_to_float(u16 half_bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half_bits));
    return wide;
}

__device__ inline float to_float(u16 bits) {
#ifdef HALF
    return half_to_float(bits);
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

__device__ inline u16 rounded(float wide) {
    u16 bits;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(wide));
    return bits;
}

// Two values rounded to the kernel's type and packed, the first in the lower half.
__device__ inline u32 rounded_pair(float first, float second) {
    u32 packed;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

// The values in the lower and in the upper half of a pair.
#ifdef HALF
#    define HALF_OF_PAIR(NAME, PART)                                                               \
        __device__ inline float NAME(u32 pair) {                                                   \
            float wide;                                                                            \
            asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, " PART "; }"                \
                : "=f"(wide)                                                                       \
                : "r"(pair));                                                                      \
            return wide;                                                                           \
        }
HALF_OF_PAIR(low, "a")
HALF_OF_PAIR(high, "b")
#    undef HALF_OF_PAIR
#else
__device__ inline float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
#endif

// Transposes an 8 × 8 matrix across a warp: of lane t, in row t / 4, columns 2 · (t % 4), + 1.
__device__ inline u32 transpose_8x8(u32 pair) {
    u32 to;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(pair));
    return to;
}

// silu(gate) · up; both inputs were rounded to the output's type before.
__device__ inline float silu_mul(float gate, float up) {
    return gate / (1.0f + __expf(-gate)) * up;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x;
}
