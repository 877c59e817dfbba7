// Products of 8-bit values on Hopper: D[64, N] += A[64, 32] · B[N, 32]ᵀ, both in shared memory, rows of 128 bytes along K
// (hopper.cuh tells how they lie and who holds what of D). Compiled with -DFP8 values are e4m3 and sums float32, of
// which the hardware keeps fewer bits; else int8 and exact int32.
#pragma once
#include "hopper.cuh"

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

__device__ inline void load_box(u32 target, const TensorMap &map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

template <int COUNT>
__device__ inline void changed(int (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define KEEP_4(d, i) HOLD8(d[i]), HOLD8(d[i + 1]), HOLD8(d[i + 2]), HOLD8(d[i + 3])
#define KEEP_16(d, i) KEEP_4(d, i), KEEP_4(d, i + 4), KEEP_4(d, i + 8), KEEP_4(d, i + 12)
#define KEEP_32(d, i) KEEP_16(d, i), KEEP_16(d, i + 16)
#define KEEP_64(d, i) KEEP_32(d, i), KEEP_32(d, i + 32)
#define NAMES_96 \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81" \
            ", %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 \
    NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
            ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126" \
            ", %127"

// add = 0: D is set instead.
__device__ inline void product8(Sum (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32" KINDS
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add" SIGNS "; }"
                 : KEEP_16(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product8(Sum (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32" KINDS "{" NAMES_32 "}, %32, %33, add" SIGNS "; }"
                 : KEEP_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product8(Sum (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32" KINDS "{" NAMES_64 "}, %64, %65, add" SIGNS "; }"
                 : KEEP_64(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product8(Sum (&d)[96], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %98, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n192k32" KINDS "{" NAMES_96 "}, %96, %97, add" SIGNS "; }"
                 : KEEP_64(d, 0), KEEP_32(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product8(Sum (&d)[128], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k32" KINDS "{" NAMES_128 "}, %128, %129, add" SIGNS "; }"
                 : KEEP_64(d, 0), KEEP_64(d, 64)
                 : "l"(a), "l"(b), "r"(add));
}
