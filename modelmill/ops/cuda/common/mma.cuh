// Tensor-core products of one warp.
//
// Computes: D[16, 8] += A[16, K] · B[8, K]ᵀ; A is the weight (M of the instruction is N of the
//     linear op), B is x
// Range: K = 16 (16-bit operands, float32 accumulators) or K = 32 (int8, int32 accumulators)
// Technique: mma.sync m16n8k16 and m16n8k32
// Used by: moe_fragments.cuh, paged_decode16.cu, paged_decode8.cu, weight_only.cuh,
//     wq_gemm_small_m.cu
//
// Fragments: lane l holds rows l / 4 and l / 4 + 8 of A, column l / 4 of Bᵀ, and columns 2 (l % 4),
// + 1 of its two rows of D. The four lanes with the same l / 4 are a quad. Any permutation of K is
// allowed if A and B use the same one, so operands are used in the order in which they were loaded.
#pragma once
#include "common/hopper.cuh"
#include "common/half_types.cuh"

#ifdef HALF
constexpr u32 ONE_PAIR = 0x3C003C00u;  // a pair of 1.0
#else
constexpr u32 ONE_PAIR = 0x3F803F80u;
#endif

__device__ inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void mma(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
