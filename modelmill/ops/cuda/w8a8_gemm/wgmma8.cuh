// wgmma with 8-bit operands: D[64, N] += A[64, 32] · B[N, 32]ᵀ, both in shared memory, K-major rows
// of 128 bytes with the 128-byte swizzle (fragment and shared-memory layout: wgmma.cuh). With -DFP8
// operands are e4m3 and accumulators float32 (the hardware keeps fewer mantissa bits), else int8
// with exact int32 accumulators. Used by gemm_8bit.cu.
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

// add = 0: D is overwritten instead of accumulated.
__device__ inline void wgmma_8bit(Sum (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32" TYPES_8BIT "{" REGS_16
                 "}, %16, %17, add" SCALE_AB "; }"
                 : ACC8_16(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32" TYPES_8BIT "{" REGS_32
                 "}, %32, %33, add" SCALE_AB "; }"
                 : ACC8_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32" TYPES_8BIT "{" REGS_64
                 "}, %64, %65, add" SCALE_AB "; }"
                 : ACC8_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[96], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %98, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k32" TYPES_8BIT "{" REGS_96
                 "}, %96, %97, add" SCALE_AB "; }"
                 : ACC8_64(d, 0), ACC8_32(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[128], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32" TYPES_8BIT "{" REGS_128
                 "}, %128, %129, add" SCALE_AB "; }"
                 : ACC8_64(d, 0), ACC8_64(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}
