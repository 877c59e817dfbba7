// Instructions of the GEMV kernel beside hopper.cuh.
//
// Computes: D[16, 8] += A[16, 32] · B[8, 32]ᵀ in int32, and the atomic counter in shared memory
// Dtypes: A int8 (BITS 8) or unsigned codes (BITS 4), B int8
// Layout: fragments as in mma.cuh
// Range: BITS 4 or 8
// Technique: 8-bit mma.sync m16n8k32, shared-memory atomics
// Used by: wq_gemv.cu
//
// Macro: BITS.
#pragma once
#include "common/hopper.cuh"

#if BITS == 4
#    define A_TYPE "u8"
#else
#    define A_TYPE "s8"
#endif

// d += a . b: 16 rows of 32 bytes by 32 x 8 signed bytes.
__device__ inline void mma_int8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." A_TYPE ".s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Increments the counter (wrapping from `limit` to 0) and returns the old value. Release: the
// stores of this thread are visible to the threads that increment after it.
__device__ inline u32 shared_atomic_inc(u32* counter, u32 limit) {
    u32 before;
    asm volatile("fence.acq_rel.cta;\n"
                 "atom.relaxed.cta.shared::cta.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(counter)), "r"(limit)
                 : "memory");
    return before;
}

__device__ inline void fence_acquire() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// Stops the compiler from recomputing the number instead of keeping it in a register.
__device__ inline void keep_in_register(u32& number) { asm volatile("" : "+r"(number)); }
