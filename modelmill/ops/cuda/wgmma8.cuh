// Products of 8-bit values on Hopper: D[64, N] += A[64, 32] · B[N, 32]ᵀ, both in shared memory, rows of 128 bytes along K
// (wgmma.cuh tells how they lie and who holds what of D). Compiled with -DFP8 values are e4m3 and sums float32, of
// which the hardware keeps fewer bits; else int8 and exact int32.
#pragma once
#include "wgmma.cuh"

#ifdef FP8
typedef float Sum;
#define HOLD8 "+f"
#define KINDS ".f32.e4m3.e4m3 "
#define SIGNS ", 1, 1"
#else
typedef int Sum;
#define HOLD8 "+r"
#define KINDS ".s32.s8.s8 "
#define SIGNS ""
#endif

#define KEEP_4(d, i) HOLD8(d[i]), HOLD8(d[i + 1]), HOLD8(d[i + 2]), HOLD8(d[i + 3])
#define KEEP_16(d, i) KEEP_4(d, i), KEEP_4(d, i + 4), KEEP_4(d, i + 8), KEEP_4(d, i + 12)
#define KEEP_32(d, i) KEEP_16(d, i), KEEP_16(d, i + 16)
#define KEEP_64(d, i) KEEP_32(d, i), KEEP_32(d, i + 32)

// add = 0: D is set instead.
__device__ inline void wgmma_8bit(Sum (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32" KINDS "{" NAMES_16 "}, %16, %17, add" SIGNS "; }"
                 : KEEP_16(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32" KINDS "{" NAMES_32 "}, %32, %33, add" SIGNS "; }"
                 : KEEP_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32" KINDS "{" NAMES_64 "}, %64, %65, add" SIGNS "; }"
                 : KEEP_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[96], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %98, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k32" KINDS "{" NAMES_96 "}, %96, %97, add" SIGNS "; }"
                 : KEEP_64(d, 0), KEEP_32(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma_8bit(Sum (&d)[128], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32" KINDS "{" NAMES_128 "}, %128, %129, add" SIGNS "; }"
                 : KEEP_64(d, 0), KEEP_64(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}
