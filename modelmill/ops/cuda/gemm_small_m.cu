// Products of a few rows with 16-bit weights, at the speed of memory: out[t, n] = sum_k x[t, k] · w[n, k] (+ bias[n]), or
// with GATED of a weight whose first half is a gate: out[t, n] = silu(gate) · up. Sums in float32.
//
// A block computes PARTS · WIDE columns of the output for all rows of x, over all of K: the sizes are chosen so that
// every multiprocessor has one block, and each weight is read once. One thread keeps STAGES slabs of SPAN · 64 columns
// on their way; those of the weight do not depend on the kernel in front and leave before it has ended. Warpgroups
// multiply (wgmma) 64 rows of x each; rows that do not exist are computed from whatever lies there, and not stored.
//
// With CLUSTER > 1 the blocks of a cluster bring a share of x's rows each, which goes to all of them: x is read by every
// block, and with many rows that would be more than the weights.
//
// Macros: BOX (rows of x, padded: 8 … 256), WIDE (32, 64, 96, 128), PARTS (1, 2), SPAN, STAGES, CLUSTER, GATED, INVITE
// (let the next kernel in before those in front have ended), HALF (float16 for bfloat16).
#include "cluster.cuh"
#include "smem_pipeline.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = BOX <= 64 ? 1 : BOX / 64, THREADS = CONSUMERS * 128 + 32;
constexpr u32 X_SLAB = BOX * 128, W_SLAB = PARTS * WIDE * 128;
constexpr u32 X_BYTES = SPAN * X_SLAB, W_BYTES = SPAN * W_SLAB, AT_W = STAGES * X_BYTES;
constexpr u32 AT_BARRIERS = AT_W + STAGES * W_BYTES;
static_assert(BOX / CLUSTER % 8 == 0, "a share of x is whole groups of 8 rows");
static_assert(BOX % 64 == 0 || STAGES * W_BYTES >= 8 * EIGHT_ROWS, "a product reads 64 rows of x, which must exist");

struct Work {
    const u16 *bias; // of x's type, or null
    u16 *out;
    int tokens, n, stages, out_stride; // n: columns of the output; stages: SPAN slabs of K
};
static_assert(sizeof(Work) == 32, "gemm.py packs 32 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// As half_types.cuh's ``gated``, with an exponential that is faster as it knows no denormal numbers.
__device__ inline float gated_fast(float gate, float up) {
    return gate / (1.0f + exp2_fast(-LOG2E * gate)) * up;
}

struct Producer {
    const TensorMap &x_map, &w_map;
    const Work &work;
    Barriers &barriers;
    u32 base, rank;

    __device__ u32 full(int stage) const { return shared_address(&barriers.full[stage]); }

    __device__ void weights(int stage, int step) const {
        mbarrier_arrive_expect_tx(full(stage), X_BYTES + W_BYTES);
#pragma unroll
        for (int i = 0; i < SPAN; ++i) {
            const int column = (step * SPAN + i) * 64;
            const u32 target = base + AT_W + stage * W_BYTES + i * W_SLAB;
            if (GATED) {
                tma_load(target, w_map, full(stage), column, blockIdx.x * WIDE);
                tma_load(target + W_SLAB / 2, w_map, full(stage), column, work.n + blockIdx.x * WIDE);
            } else {
                tma_load(target, w_map, full(stage), column, blockIdx.x * (PARTS * WIDE));
            }
        }
    }

    __device__ void rows(int stage, int step) const {
#pragma unroll
        for (int i = 0; i < SPAN; ++i) {
            const int column = (step * SPAN + i) * 64, row = rank * (BOX / CLUSTER);
            const u32 target = base + stage * X_BYTES + i * X_SLAB + row * 128;
            if (CLUSTER > 1)
                tma_load_multicast(target, x_map, full(stage), column, row, (1 << CLUSTER) - 1);
            else
                tma_load(target, x_map, full(stage), column, row);
        }
    }

    __device__ void run() const {
        const int ahead = work.stages < STAGES ? work.stages : STAGES;
        for (int i = 0; i < ahead; ++i) weights(i, i);
        if (INVITE) pdl_launch_dependents();
        pdl_wait();
        if (!INVITE) pdl_launch_dependents();
        for (int i = 0; i < ahead; ++i) rows(i, i);
        int stage = 0;
        u32 parity = 0;
        for (int step = STAGES; step < work.stages; ++step) {
            mbarrier_wait(shared_address(&barriers.empty[stage]), parity);
            weights(stage, step);
            rows(stage, step);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
};

__device__ void multiply(const Work &work, Barriers &barriers, int consumer) {
    const u32 base = shared_address(shared);
    const int thread = threadIdx.x % 128, lane = thread % 32;
    float d[PARTS][WIDE / 2];
    int stage = 0, last = -1;
    u32 parity = 0;
    for (int step = 0; step < work.stages; ++step) {
        mbarrier_wait(shared_address(&barriers.full[stage]), parity);
        const u32 x = base + stage * X_BYTES + consumer * 64 * 128, w = base + AT_W + stage * W_BYTES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SPAN * 4; ++i) {
            const u64 left = k_major_descriptor(x + i / 4 * X_SLAB + i % 4 * 32, EIGHT_ROWS);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                wgmma(d[part], left, k_major_descriptor(w + i / 4 * W_SLAB + part * (WIDE * 128) + i % 4 * 32, EIGHT_ROWS),
                        step > 0 || i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>(); // those of the step before
        if (last >= 0 && lane < CLUSTER) mbarrier_arrive_cluster(shared_address(&barriers.empty[last]), lane);
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) wgmma_fence_operand(d[part]);
    const int row = consumer * 64 + thread / 32 * 16 + lane / 4;
    constexpr int OUTPUTS = GATED ? 1 : PARTS;
#pragma unroll
    for (int part = 0; part < OUTPUTS; ++part) {
#pragma unroll
        for (int i = 0; i < WIDE / 8; ++i) {
            const int column = (blockIdx.x * OUTPUTS + part) * WIDE + 8 * i + 2 * (lane % 4);
            if (column >= work.n) continue;
            float add[2] = {0.0f, 0.0f}, more[2] = {0.0f, 0.0f};
            if (work.bias != nullptr) {
                add[0] = value(work.bias[column]), add[1] = value(work.bias[column + 1]);
                if (GATED) more[0] = value(work.bias[work.n + column]), more[1] = value(work.bias[work.n + column + 1]);
            }
#pragma unroll
            for (int down = 0; down < 2; ++down) {
                const int token = row + 8 * down;
                u32 both = rounded_pair(d[part][4 * i + 2 * down] + add[0], d[part][4 * i + 2 * down + 1] + add[1]);
                if (GATED) {
                    const u32 up = rounded_pair(d[PARTS - 1][4 * i + 2 * down] + more[0],
                                                d[PARTS - 1][4 * i + 2 * down + 1] + more[1]);
                    both = rounded_pair(gated_fast(value(both & 0xFFFF), value(up & 0xFFFF)),
                                        gated_fast(value(both >> 16), value(up >> 16)));
                }
                if (token < work.tokens)
                    *reinterpret_cast<u32 *>(work.out + static_cast<long long>(token) * work.out_stride + column) = both;
            }
        }
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, 1)
    gemm_small_m(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
             const __grid_constant__ Work work) {
    Barriers &barriers = *reinterpret_cast<Barriers *>(shared + AT_BARRIERS);
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4 * CLUSTER); // a warp, for each block
        fence_mbarrier_init();
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    }
    if (CLUSTER > 1)
        cluster_sync_relaxed();
    else
        __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == CONSUMERS) {
        if (threadIdx.x % 32 == 0)
            Producer{x_map, w_map, work, barriers, shared_address(shared), CLUSTER > 1 ? cluster_rank() : 0}.run();
        __syncwarp();
    } else {
        multiply(work, barriers, group);
    }
    if (CLUSTER > 1) cluster_sync_relaxed(); // a block that ended could not be written to, nor arrived at
}
