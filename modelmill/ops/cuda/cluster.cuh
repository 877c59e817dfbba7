// Clusters: blocks that run at the same time and read one another's shared memory; a box may be brought to several of
// them at once ("multicast").
#pragma once
#include "hopper.cuh"

__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster meet. A relaxed arrival: of what they stored before, only barriers are seen
// behind it, made so by ``fence_mbarrier_init``.
__device__ inline void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same, and what they stored before is seen behind it.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrive at the same barrier of another block of the cluster, or of this one. What this thread stored is not thereby
// seen there, which would cost a fence each time: for stages that products have read, and nobody has written.
__device__ inline void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// The box arrives at the same place in every block of ``blocks`` (a bit each), and at the same barrier of each.
__device__ inline void tma_load_multicast(u32 target, const TensorMap &map, u32 barrier, int x, int y, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
                 : "memory");
}

// A float in the shared memory of another block, at the address that ``mine`` has here.
__device__ inline float dsmem_load(const float *mine, int rank) {
    float got;
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %1, %2;\n"
                 "ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(got)
                 : "r"(shared_address(mine)), "r"(rank)
                 : "memory");
    return got;
}
