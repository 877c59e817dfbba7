// Products of a warpgroup (wgmma) of 16-bit values: D[64, N] (float32, in the warpgroup's registers) += A[64, 16] · B[16, N].
//
// D: thread t of warp w holds rows 16·w + t/4 and 8 below it; d[4·i], d[4·i + 1] are columns 8·i + 2·(t%4), +1 of the
// first row, d[4·i + 2], d[4·i + 3] the same of the second. A in registers: four words of two values, where words 0, 2
// are the first row's columns 2·(t%4), +1 and those 8 further, words 1, 3 the second row's.
//
// A matrix in shared memory is named by a descriptor. All of ours lie as the copy engine's 128-byte swizzle writes
// them: rows of 128 bytes (64 values), whose 16-byte pieces are exchanged within every 8 rows (piece p of row r lies at
// p ^ (r % 8)), so that eight rows' pieces of one column fall in eight different groups of banks. Tiles start at
// multiples of 1,024 bytes: 8 rows of 64 values. A larger matrix is several of these, in an order of its own.
#pragma once
#include "hopper.cuh"
#include "half_types.cuh"

constexpr u32 EIGHT_ROWS = 8 * 128; // bytes

__device__ inline u64 descriptor(u32 address, u32 across, u32 down) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | u64(down >> 4) << 32 | u64(across >> 4) << 16 | u64((address & 0x3FFFF) >> 4);
}

// The summed-over values run along the rows (Q and K: the head's dimension). The next 8 rows lie ``down`` bytes further.
// 16 values further is 32 bytes further, even though swizzled: the hardware exchanges pieces by the address that results.
__device__ inline u64 k_major_descriptor(u32 address, u32 down) {
    return descriptor(address, 16, down);
}

// The summed-over index is the row (V: a row for each key). The next 64 columns lie ``across`` bytes further, the next
// 8 rows ``down``.
__device__ inline u64 mn_major_descriptor(u32 address, u32 across, u32 down) {
    return descriptor(address, across, down);
}

// Registers that the warpgroup has written may be read by the products that follow.
__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// The products issued since the last call become one group.
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Tells the compiler, which does not know that products run on after their instruction, that d changes here.
template <int COUNT>
__device__ inline void wgmma_fence_operand(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT>
__device__ inline void wgmma_fence_operand(u32 (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

template <int COUNT>
__device__ inline void wgmma_fence_operand(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Waits until at most LEFT groups are running.
template <int LEFT>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define HOLD_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOLD_16(d, i) HOLD_4(d, i), HOLD_4(d, i + 4), HOLD_4(d, i + 8), HOLD_4(d, i + 12)
#define HOLD_32(d, i) HOLD_16(d, i), HOLD_16(d, i + 16)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32                                                                                                       \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64                                                                                                       \
    NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96                                                                                                       \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "  \
             "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_112                                                                                                      \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_128                                                                                                      \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "    \
             "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// D = A · Bᵀ (add = 0) or D += A · Bᵀ (add = 1), A and B in shared memory, both k_major_descriptor.
__device__ inline void wgmma(float (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" NAMES_16 "}, %16, %17, add, 1, 1, 0, 0; }"
                 : HOLD_16(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32 "}, %32, %33, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[48], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " {" NAMES_48 "}, %48, %49, add, 1, 1, 0, 0; }"
                 : HOLD_16(d, 0), HOLD_32(d, 16)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64 "}, %64, %65, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0), HOLD_32(d, 32)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[112], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %114, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n224k16.f32." TYPE "." TYPE " {" NAMES_112
                 "}, %112, %113, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0), HOLD_32(d, 32), HOLD_32(d, 64), HOLD_16(d, 96)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" NAMES_128
                 "}, %128, %129, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0), HOLD_32(d, 32), HOLD_32(d, 64), HOLD_32(d, 96)
                 : "l"(a), "l"(b), "r"(add));
}

// D += A · B, A in registers, B in shared memory mn_major_descriptor.
__device__ inline void wgmma(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : HOLD_32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

__device__ inline void wgmma(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : HOLD_32(d, 0), HOLD_32(d, 32)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// D = A · Bᵀ (add = 0) or D += A · Bᵀ (add = 1), A in registers, B in shared memory k_major_descriptor.
__device__ inline void wgmma(float (&d)[16], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" NAMES_16
                 "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0; }"
                 : HOLD_16(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

__device__ inline void wgmma(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
                 : HOLD_32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}
