// What Hopper (sm_90a) offers beyond plain CUDA C++, each instruction under a name: mbarriers, the copy engine (TMA),
// named barriers, moving registers between warpgroups, programmatic dependent launch. Products are in wgmma.cuh
// (warpgroups) and mma.cuh (warps), what a cluster adds in cluster.cuh.
//
// No header outside this folder is included: NVRTC then needs nothing else. "Warpgroup": 4 consecutive warps, 128
// threads, which issue a product together.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

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

__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that this thread initialised visible to the copy engine.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and announce bytes that copies will bring: the phase ends when they have all landed.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
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
// tensor arrives as zeros. The same box may be stored: what lies outside is not written.

__device__ inline void tma_load(u32 target, const TensorMap &map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ inline void tma_load(u32 target, const TensorMap &map, u32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ inline void tma_load(u32 target, const TensorMap &map, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Bytes that lie side by side, no box; multiples of 16, at addresses of 16.
__device__ inline void bulk_load(u32 target, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The thread that asks closes a group of stores with ``tma_store_commit`` and waits with ``tma_store_wait_read`` or ``tma_store_wait``.
__device__ inline void tma_store(const TensorMap &map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(source),
                 "r"(x), "r"(y)
                 : "memory");
}

__device__ inline void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the copy engine has read everything that this thread's stores were to write: its place may be used again.
__device__ inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Until they have been written.
__device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The descriptor itself is read through a cache: before the first box it may as well be there.
__device__ inline void prefetch_tensor_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What this thread stored to shared memory becomes visible to the copy engine and to products: they read it by another
// way (the "async proxy") than loads and stores do.
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Named barriers among some of the block's warps: id 1 … 15, threads a multiple of 32.

__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts at a named barrier without waiting there.
__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Registers: a warpgroup gives back what it does not need, another takes it. The file holds 65,536.

template <int COUNT>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Early launch: a kernel may be placed before the one in front has ended (programmatic dependent launch).

// Until the kernels in front have ended; nothing that they write may be read before.
__device__ inline void pdl_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be placed, as soon as all blocks have said so or ended.
__device__ inline void pdl_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
