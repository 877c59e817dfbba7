// Products of a warp (mma) with 4- and 8-bit weights: D[16, 8] += A[16, K] · B[8, K]ᵀ, K = 16 values of 16 bits or 32 of
// 8. Lane l of the warp has rows l / 4 and l / 4 + 8 of A, column l / 4 of Bᵀ, and of D columns 2 (l % 4), + 1 of its two
// rows. Four lanes with the same l / 4 are a "quad". Which column of the matrices a slot along K stands for is free, as
// long as A and B agree on it.
#pragma once
#include "hopper.cuh"
#include "half_types.cuh"

#ifdef HALF
constexpr u32 ONE_PAIR = 0x3C003C00u; // a pair of 1.0
#else
constexpr u32 ONE_PAIR = 0x3F803F80u;
#endif

__device__ inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void multiply(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
