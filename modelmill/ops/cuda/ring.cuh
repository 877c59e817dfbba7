// A ring of buffers in shared memory between the thread that has the copy engine fill them and the warps that read them.
#pragma once
#include "hopper.cuh"

// A place in a ring of COUNT buffers, and the parity of the phase in which that buffer is filled. Who fills waits for
// the other parity, with which a fresh barrier counts as having ended a phase: so the first round does not wait.
template <int COUNT>
struct RingPlace {
    int stage = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++stage == COUNT) stage = 0, parity ^= 1;
    }
};

// "full" ends a phase when bytes have landed, "empty" when all readers have arrived.
template <int COUNT>
struct RingBarriers {
    u64 full[COUNT], empty[COUNT];

    // By one thread; others may use them after ``barriers_ready`` and a meeting.
    __device__ void init(int readers) {
        for (int stage = 0; stage < COUNT; ++stage) init(stage, readers);
    }

    __device__ void init(int stage, int readers) {
        barrier_init(shared_address(&full[stage]), 1);
        barrier_init(shared_address(&empty[stage]), readers);
    }
};
