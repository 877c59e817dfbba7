// PTX wrappers for Hopper beside the tensor cores (wgmma.cuh, mma.cuh) and clusters (cluster.cuh).
//
// Computes: mbarriers, TMA loads and stores, named barriers, setmaxnreg and programmatic dependent
//     launch
// Range: sm_90a
// Technique: TMA, mbarrier, named barriers, setmaxnreg, PDL
// Used by: cluster.cuh, digit_planes.cuh, half_types.cuh, mma.cuh, moe_align.cu,
//     rmsnorm_quant_permute.cu, rmsnorm_quant_permute_small_m.cu, smem_pipeline.cuh, tile_rows.cuh,
//     tile_scales.cuh, wgmma.cuh
//
// Includes no header outside this backend, so that NVRTC needs no toolkit. A warpgroup is 4
// consecutive warps (128 threads) that issue a wgmma together.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A TMA tensor map, encoded on the host by cuTensorMapEncodeTiled (launch.tensor_map).
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers. A barrier counts arrivals and expected transaction bytes; its phase completes
// when both counts reach zero. A waiter passes the parity of the phase: 0 for the first phase, 1
// for the second, 0 for the third … A new barrier behaves as if a phase of parity 1 had completed.

__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

// Makes barriers initialised by this thread visible to TMA and to the other blocks of the cluster.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and adds `bytes` to the expected transaction count: the phase completes once they landed.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}\n" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// ---- TMA: one thread issues the copy of one box of the tensor map; its bytes are counted at an
// mbarrier. Elements outside the tensor are loaded as zeros and are not written by stores.

__device__ inline void tma_load(u32 target, const TensorMap& map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ inline void tma_load(u32 target, const TensorMap& map, u32 barrier, int x, int y,
                                int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ inline void tma_load(u32 target, const TensorMap& map, u32 barrier, int x, int y, int z,
                                int w) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Bulk copy of contiguous bytes without a tensor map; size and addresses are multiples of 16.
__device__ inline void bulk_load(u32 target, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The issuing thread commits its stores with tma_store_commit and waits with tma_store_wait_read or
// tma_store_wait.
__device__ inline void tma_store(const TensorMap& map, u32 source, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(source), "r"(x), "r"(y)
        : "memory");
}

__device__ inline void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until TMA has read the shared memory of this thread's stores, which may then be
// overwritten.
__device__ inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this thread's stores have been written to global memory.
__device__ inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Prefetches the tensor map into the descriptor cache before the first copy.
__device__ inline void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's shared-memory stores visible to the async proxy, through which TMA and wgmma
// read shared memory.
__device__ inline void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Named barriers among some of the block's warps: id 1 … 15, threads a multiple of 32.

__device__ inline void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting.
__device__ inline void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- setmaxnreg: moves registers between warpgroups. An SM has 65,536 registers.

template <int COUNT> __device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> __device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- Programmatic dependent launch (PDL): blocks may start before the previous kernel has ended.

// Waits until the previous kernels have completed; their results must not be read earlier.
__device__ inline void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel start once every block of this one has executed this or exited.
__device__ inline void pdl_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
