// Shared-memory pipeline: a ring of stages between the producer, one thread that issues TMA loads, and the consumers, the
// warpgroups that compute. Each stage has a full and an empty mbarrier.
#pragma once
#include "hopper.cuh"

// The current stage of COUNT, and the parity of the phase in which it is filled. The producer waits for the other parity,
// which a fresh barrier counts as completed: the first round does not wait.
template <int COUNT>
struct PipelineState {
    int stage = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// "full" ends a phase when bytes have landed, "empty" when all readers have arrived.
template <int COUNT>
struct PipelineBarriers {
    u64 full[COUNT], empty[COUNT];

    // By one thread; others may use them after ``fence_mbarrier_init`` and a meeting.
    __device__ void init(int readers) {
        for (int stage = 0; stage < COUNT; ++stage) init(stage, readers);
    }

    __device__ void init(int stage, int readers) {
        mbarrier_init(shared_address(&full[stage]), 1);
        mbarrier_init(shared_address(&empty[stage]), readers);
    }
};
