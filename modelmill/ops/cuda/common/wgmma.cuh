// Tensor-core products of a warpgroup with 16-bit operands.
//
// Computes: D[64, N] (float32, registers) += A[64, 16] · B[16, N]
// Range: A in shared memory or in registers, B in shared memory, tiles of 64 columns
// Technique: wgmma.mma_async
// Used by: gemm_large_m.cuh, gemm_small_m.cu, paged_attention.cu, wgmma8.cuh,
//     wq_gemm_tile.cuh
//
// D: thread t of warp w holds rows 16·w + t/4 and that + 8; d[4·i], d[4·i + 1] are columns 8·i +
// 2·(t%4), + 1 of the first row, d[4·i + 2], d[4·i + 3] the same of the second. A in registers:
// four words of two values; words 0, 2 are columns 2·(t%4), + 1 and those + 8 of the first row,
// words 1, 3 of the second.
//
// Operands in shared memory are addressed by matrix descriptors. All tiles use the TMA 128-byte
// swizzle: rows of 128 bytes (64 values) whose 16-byte chunks are permuted within every 8 rows
// (chunk p of row r is stored at p ^ (r % 8)), so that one column of eight rows has no bank
// conflict. Tiles are aligned to 1,024 bytes, the swizzle atom of 8 rows by 64 values; larger
// operands are several atoms.
#pragma once
#include "common/hopper.cuh"
#include "common/half_types.cuh"

constexpr u32 SWIZZLE_ATOM_BYTES = 8 * 128;  // bytes

__device__ inline u64 descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | u64(stride_bytes >> 4) << 32 | u64(leading_bytes >> 4) << 16 |
           u64((address & 0x3FFFF) >> 4);
}

// K-major operand: the reduction dimension is contiguous (Q and K of attention: the head
// dimension). stride_bytes: from one group of 8 rows to the next. A step of 16 values advances the
// address by 32 bytes in spite of the swizzle, which the hardware applies to the resulting address.
__device__ inline u64 k_major_descriptor(u32 address, u32 stride_bytes) {
    return descriptor(address, 16, stride_bytes);
}

// MN-major operand: rows are the reduction dimension (V of attention: one row per key).
// leading_bytes: to the next 64 columns; stride_bytes: to the next 8 rows.
__device__ inline u64 mn_major_descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
    return descriptor(address, leading_bytes, stride_bytes);
}

// Orders the warpgroup's register writes before the wgmmas that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of the wgmmas issued since the last commit.
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Compiler fence on registers of an asynchronous wgmma: d counts as modified here.
template <int COUNT> __device__ inline void wgmma_fence_operand(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT> __device__ inline void wgmma_fence_operand(u32 (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

template <int COUNT> __device__ inline void wgmma_fence_operand(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Waits until at most MAX_PENDING groups are in flight.
template <int MAX_PENDING> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MAX_PENDING) : "memory");
}

// Commits products with A in registers and waits for them: wgmma reads a until it completes.
template <int COUNT, int STEPS>
__device__ inline void wgmma_finish(float (&d)[COUNT], u32 (&a)[STEPS][4]) {
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < STEPS; ++i) wgmma_fence_operand(a[i]);
    wgmma_wait<0>();
    wgmma_fence_operand(d);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) wgmma_fence_operand(a[i]);
}

#define ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC_8(d, i) ACC_4(d, i), ACC_4(d, i + 4)
#define ACC_16(d, i) ACC_8(d, i), ACC_8(d, i + 8)
#define ACC_32(d, i) ACC_16(d, i), ACC_16(d, i + 16)
#define ACC_64(d, i) ACC_32(d, i), ACC_32(d, i + 32)
#define ACC_96(d, i) ACC_64(d, i), ACC_32(d, i + 64)
#define ACC_128(d, i) ACC_64(d, i), ACC_64(d, i + 64)
#define REGS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS_16 REGS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_32                                                                                    \
    REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_48                                                                                    \
    REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_64                                                                                    \
    REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_96                                                                                              \
    REGS_64                                                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
    "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGS_112                                                                                   \
    REGS_96                                                                                        \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define REGS_128                                                                                           \
    REGS_96                                                                                                \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
    "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// D = A · Bᵀ (add = 0) or D += A · Bᵀ (add = 1), A and B in shared memory, both k_major_descriptor;
// of COUNT registers of D and N columns. A, B and ADD: the operands' numbers, after D's.
#define WGMMA_SHARED(COUNT, N, A, B, ADD, ...)                                                     \
    __device__ inline void wgmma(float (&d)[COUNT], u64 a, u64 b, int add) {                       \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #ADD ", 0;\n"                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                     " {" REGS_##COUNT "}, %" #A ", %" #B ", add, 1, 1, 0, 0; }"                   \
                     : __VA_ARGS__                                                                 \
                     : "l"(a), "l"(b), "r"(add));                                                  \
    }
WGMMA_SHARED(16, 32, 16, 17, 18, ACC_16(d, 0))
WGMMA_SHARED(32, 64, 32, 33, 34, ACC_32(d, 0))
WGMMA_SHARED(48, 96, 48, 49, 50, ACC_16(d, 0), ACC_32(d, 16))
WGMMA_SHARED(64, 128, 64, 65, 66, ACC_64(d, 0))
WGMMA_SHARED(112, 224, 112, 113, 114, ACC_64(d, 0), ACC_32(d, 64), ACC_16(d, 96))
WGMMA_SHARED(128, 256, 128, 129, 130, ACC_64(d, 0), ACC_64(d, 64))
#undef WGMMA_SHARED

// D += A · B, A in registers, B in shared memory mn_major_descriptor.
__device__ inline void wgmma(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" REGS_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : ACC_32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

__device__ inline void wgmma(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGS_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : ACC_64(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// D = A · Bᵀ (add = 0) or D += A · Bᵀ (add = 1), A in registers, B in shared memory
// k_major_descriptor.
#define WGMMA_REGISTERS(COUNT, N, A, B, ADD)                                                       \
    __device__ inline void wgmma(float (&d)[COUNT], u32 a0, u32 a1, u32 a2, u32 a3, u64 b,         \
                                 int add) {                                                        \
        asm volatile("{ .reg .pred add; setp.ne.b32 add, %" #ADD ", 0;\n"                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE               \
                     " {" REGS_##COUNT "}, {" A "}, %" #B ", add, 1, 1, 0; }"                      \
                     : ACC_##COUNT(d, 0)                                                           \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));                      \
    }
WGMMA_REGISTERS(8, 16, "%8, %9, %10, %11", 12, 13)
WGMMA_REGISTERS(16, 32, "%16, %17, %18, %19", 20, 21)
WGMMA_REGISTERS(32, 64, "%32, %33, %34, %35", 36, 37)
WGMMA_REGISTERS(64, 128, "%64, %65, %66, %67", 68, 69)
WGMMA_REGISTERS(96, 192, "%96, %97, %98, %99", 100, 101)
WGMMA_REGISTERS(128, 256, "%128, %129, %130, %131", 132, 133)
#undef WGMMA_REGISTERS
