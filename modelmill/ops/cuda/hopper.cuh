// What Hopper (sm_90a) offers beyond plain CUDA C++, each instruction under a name: mbarriers, the copy engine (TMA),
// warpgroup matrix products (wgmma), named barriers, moving registers between warpgroups.
//
// No header is included: NVRTC then needs nothing but this folder. Compiled with -DHALF values are float16, else
// bfloat16. "Warpgroup": 4 consecutive warps, 128 threads, which issue a product together.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif

// A descriptor of a tensor in memory that the copy engine reads, made on the host (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ inline u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers. A barrier counts arrivals and, where copies were announced, bytes; a phase ends when nothing is
// outstanding. Who waits names the parity of the phase whose end it needs: 0 for the first, 1 for the second, 0 …
// A fresh barrier counts as having ended a phase of parity 1.

__device__ inline void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that this thread initialised visible to the copy engine.
__device__ inline void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and announce bytes that copies will bring: the phase ends when they have all landed.
__device__ inline void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- The copy engine: one thread asks for a box of a tensor, whose bytes arrive at a barrier. What lies outside the
// tensor arrives as zeros.

__device__ inline void load_box(u32 target, const TensorMap &map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ inline void load_box(u32 target, const TensorMap &map, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ inline void prefetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What this thread stored to shared memory becomes visible to the copy engine and to products: they read it by another
// way (the "async proxy") than loads and stores do.
__device__ inline void fence_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Named barriers among some of the block's warps: id 1 … 15, threads a multiple of 32.

__device__ inline void meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts at a named barrier without waiting there.
__device__ inline void pass(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Registers: a warpgroup gives back what it does not need, another takes it. The file holds 65,536.

template <int COUNT>
__device__ inline void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Products. D[64, N] (float32, in the registers of a warpgroup) += A[64, 16] · B[16, N].
//
// D: thread t of warp w holds rows 16·w + t/4 and 8 below it; d[4·i], d[4·i + 1] are columns 8·i + 2·(t%4), +1 of the
// first row, d[4·i + 2], d[4·i + 3] the same of the second. A in registers: four words of two values, where words 0, 2
// are the first row's columns 2·(t%4), +1 and those 8 further, words 1, 3 the second row's.
//
// A matrix in shared memory is named by a descriptor. All of ours lie as the copy engine's 128-byte swizzle writes
// them: rows of 128 bytes (64 values), whose 16-byte pieces are exchanged within every 8 rows (piece p of row r lies at
// p ^ (r % 8)), so that eight rows' pieces of one column fall in eight different groups of banks. Tiles start at
// multiples of 1,024 bytes: 8 rows of 64 values. A larger matrix is several of these, in an order of its own.

__device__ inline u64 descriptor(u32 address, u32 across, u32 down) {
    const u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | u64(down >> 4) << 32 | u64(across >> 4) << 16 | u64((address & 0x3FFFF) >> 4);
}

// The summed-over values run along the rows (Q and K: the head's dimension). The next 8 rows lie ``down`` bytes further.
// 16 values further is 32 bytes further, even though swizzled: the hardware exchanges pieces by the address that results.
__device__ inline u64 along_rows(u32 address, u32 down) {
    return descriptor(address, 16, down);
}

// The summed-over index is the row (V: a row for each key). The next 64 columns lie ``across`` bytes further, the next
// 8 rows ``down``.
__device__ inline u64 along_columns(u32 address, u32 across, u32 down) {
    return descriptor(address, across, down);
}

// Registers that the warpgroup has written may be read by the products that follow.
__device__ inline void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// The products issued since the last call become one group.
__device__ inline void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Tells the compiler, which does not know that products run on after their instruction, that d changes here.
template <int COUNT>
__device__ inline void changed(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT>
__device__ inline void changed(u32 (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Waits until at most LEFT groups are running.
template <int LEFT>
__device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define HOLD_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOLD_16(d, i) HOLD_4(d, i), HOLD_4(d, i + 4), HOLD_4(d, i + 8), HOLD_4(d, i + 12)
#define HOLD_32(d, i) HOLD_16(d, i), HOLD_16(d, i + 16)
#define NAMES_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "  \
             "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// D = A · Bᵀ (add = 0) or D += A · Bᵀ (add = 1), A and B in shared memory, both along_rows.
__device__ inline void product(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32 "}, %32, %33, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64 "}, %64, %65, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0), HOLD_32(d, 32)
                 : "l"(a), "l"(b), "r"(add));
}

// D += A · B, A in registers, B in shared memory along_columns.
__device__ inline void product(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : HOLD_32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

__device__ inline void product(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NAMES_64
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : HOLD_32(d, 0), HOLD_32(d, 32)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// ---- Arithmetic.

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two values rounded to the kernel's type, the first in the lower half.
__device__ inline u32 rounded_pair(float first, float second) {
    u32 both;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
