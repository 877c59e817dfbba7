// What wq_gemv.cu needs of the hardware beside hopper.cuh: 8-bit products (mma.cuh tells who has what) whose left
// operand is bytes with a sign (BITS 8) or without (BITS 4), and counting in shared memory.
#pragma once
#include "hopper.cuh"

#if BITS == 4
#define LEFT "u8"
#else
#define LEFT "s8"
#endif

// d += a . b: 16 rows of 32 bytes by 32 x 8 signed bytes.
__device__ inline void mma_int8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." LEFT ".s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Counts up, from ``most`` to 0, and tells what was there; what this thread knew to be stored, who counts next knows too.
__device__ inline u32 shared_atomic_inc(u32 *at, u32 most) {
    u32 before;
    asm volatile("fence.acq_rel.cta;\n"
                 "atom.relaxed.cta.shared::cta.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(at)), "r"(most)
                 : "memory");
    return before;
}

__device__ inline void fence_acquire() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
}

// Keeps a number in a register: the compiler would rather compute it again.
__device__ inline void keep_in_register(u32 &number) {
    asm volatile("" : "+r"(number));
}
