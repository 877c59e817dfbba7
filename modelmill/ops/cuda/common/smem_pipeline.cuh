// Shared-memory pipeline between a producer thread, which issues TMA loads, and the warpgroups that
//     compute.
//
// Computes: the ring of stages: which stage is next, and the waits for its full and its empty
//     mbarrier
// Range: any number of stages
// Technique: mbarrier pipeline, warp specialization
// Used by: gemm_8bit.cu, gemm_large_m.cuh, gemm_small_m.cu, grouped_gemm_wq.cu,
//     moe_decode_mxfp4.cu, paged_attention.cu, wq_gemm_tile.cuh
#pragma once
#include "common/hopper.cuh"

// Index of the current stage of COUNT and the parity of its full phase. The producer waits at the
// empty barrier with the opposite parity, so its first round over the ring does not wait.
template <int COUNT> struct PipelineState {
    int stage = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// full: completes when the stage's bytes have landed; empty: when all consumers have arrived.
template <int COUNT> struct PipelineBarriers {
    u64 full[COUNT], empty[COUNT];

    // Called by one thread, followed by fence_mbarrier_init and a block or cluster barrier.
    __device__ void init(int consumers) {
        for (int stage = 0; stage < COUNT; ++stage) init(stage, consumers);
    }

    __device__ void init(int stage, int consumers) {
        mbarrier_init(shared_address(&full[stage]), 1);
        mbarrier_init(shared_address(&empty[stage]), consumers);
    }
};
