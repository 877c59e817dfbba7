// Thread-block clusters in PTX.
//
// Computes: rank, cluster barriers, arrivals at a remote mbarrier, DSMEM stores and TMA multicast
//     loads
// Range: clusters of 2 to 8 blocks, sm_90a
// Technique: thread-block cluster, distributed shared memory (DSMEM), TMA multicast
// Used by: add_rms_norm_router.cu, gemm_large_m.cuh, gemm_small_m.cu, paged_decode.cuh,
//     wq_gemm_small_m.cu, wq_gemm_tile.cuh
#pragma once
#include "common/hopper.cuh"

__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Cluster barrier with a relaxed arrive: earlier stores are not made visible, except mbarriers that
// were published with fence_mbarrier_init.
__device__ inline void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Cluster barrier with release and acquire: stores before it are visible to all blocks after it.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// The two halves of cluster_sync_relaxed.
__device__ inline void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores four floats to block `rank`, at the shared-memory offset `local`; its mbarrier at the
// offset `barrier` counts the bytes.
__device__ inline void dsmem_store_async(const float (&from)[4], u32 local, u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there, done;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 done, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[there], {%3, %4, %5, %6}, [done]; }" ::"r"(local),
                 "r"(barrier), "r"(rank), "r"(__float_as_uint(from[0])),
                 "r"(__float_as_uint(from[1])), "r"(__float_as_uint(from[2])),
                 "r"(__float_as_uint(from[3]))
                 : "memory");
}

// Stores a float likewise.
__device__ inline void dsmem_store_async(float from, u32 local, u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there, done;\n"
                 "mapa.shared::cluster.u32 there, %0, %2;\n"
                 "mapa.shared::cluster.u32 done, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 "
                 "[there], %3, [done]; }" ::"r"(local),
                 "r"(barrier), "r"(rank), "r"(__float_as_uint(from))
                 : "memory");
}

// Arrives at the same mbarrier of block `rank` of the cluster. Has no release semantics, which
// would cost a fence: only for stages that wgmma has read and no thread has written.
__device__ inline void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// Loads a box to the same shared-memory offset of every block in the bit mask `blocks`; each
// block's own mbarrier counts the bytes.
__device__ inline void tma_load_multicast(u32 target, const TensorMap& map, u32 barrier, int x,
                                          int y, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}
