// Tensor-core products of a warpgroup with 8-bit operands.
//
// Computes: D[64, N] += A[64, 32] · B[N, 32]ᵀ
// Dtypes: int8 with exact int32 accumulators, or with FP8 e4m3 with float32 accumulators (the
//     hardware keeps fewer mantissa bits)
// Layout: A and B in shared memory, K-major rows of 128 bytes with the 128-byte swizzle; fragments
//     as in wgmma.cuh
// Range: N 32, 64, 128, 192 or 256
// Technique: wgmma.mma_async
// Used by: gemm_8bit.cu
#pragma once
#include "common/wgmma.cuh"

#ifdef FP8
typedef float Sum;
#    define ACC8 "+f"
#    define TYPES_8BIT ".f32.e4m3.e4m3 "
#    define SCALE_AB ", 1, 1"
#else
typedef int Sum;
#    define ACC8 "+r"
#    define TYPES_8BIT ".s32.s8.s8 "
#    define SCALE_AB ""
#endif

#define ACC8_4(d, i) ACC8(d[i]), ACC8(d[i + 1]), ACC8(d[i + 2]), ACC8(d[i + 3])
#define ACC8_16(d, i) ACC8_4(d, i), ACC8_4(d, i + 4), ACC8_4(d, i + 8), ACC8_4(d, i + 12)
#define ACC8_32(d, i) ACC8_16(d, i), ACC8_16(d, i + 16)
#define ACC8_64(d, i) ACC8_32(d, i), ACC8_32(d, i + 32)

// add = 0: D is overwritten instead of accumulated. A, B and ADD: the operands' numbers, after D's.
#define WGMMA_8BIT(COUNT, N, A, B, ADD, ...)                                                       \
    __device__ inline void wgmma_8bit(Sum(&d)[COUNT], u64 a, u64 b, int add) {                     \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #ADD ", 0;\n"                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32" TYPES_8BIT "{" REGS_##COUNT      \
                     "}, %" #A ", %" #B ", add" SCALE_AB "; }"                                     \
                     : __VA_ARGS__                                                                 \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }
WGMMA_8BIT(16, 32, 16, 17, 18, ACC8_16(d, 0))
WGMMA_8BIT(32, 64, 32, 33, 34, ACC8_32(d, 0))
WGMMA_8BIT(64, 128, 64, 65, 66, ACC8_64(d, 0))
WGMMA_8BIT(96, 192, 96, 97, 98, ACC8_64(d, 0), ACC8_32(d, 64))
WGMMA_8BIT(128, 256, 128, 129, 130, ACC8_64(d, 0), ACC8_64(d, 64))
#undef WGMMA_8BIT
