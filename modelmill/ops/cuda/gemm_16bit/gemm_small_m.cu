// Small-M GEMM (decode), bound by weight bandwidth.
//
// Computes: out[M, N] = x[M, K] · w[N, K]ᵀ (+ bias[N]); with GATED w is [2N, K] and out =
//     silu(gate) · up
// Dtypes: x, w and out bfloat16 or float16; float32 accumulators
// Layout: row-major, rows 16-byte aligned; tiles in shared memory (128-byte swizzle)
// Range: 2 ≤ M ≤ 64 (not 33 … 47) where it is faster (gemm.SMALL_M_MAX_COLUMNS_PER_SM_BY_ROWS);
//     weights of 4 MiB or more, N even
// Technique: TMA with multicast, mbarrier pipeline, wgmma, thread-block cluster, PDL
// Ops: linear, linear_swiglu (launched by gemm.py)
//
// A block computes PARTS · BLOCK_N output columns for all rows of x over all of K; sizes are chosen
// so that every SM has at most one block and each weight is read once. One producer thread keeps
// STAGES stages of SLABS_PER_STAGE · 64 columns in flight by TMA; weight loads are issued before
// griddepcontrol.wait (PDL). Consumer warpgroups compute 64 rows of x each with wgmma; rows past M
// read undefined data and are not stored. With CLUSTER > 1 each block of a cluster loads a share of
// x and multicasts it, since every block reads all of x.
//
// Macros: BLOCK_M (rows of x, padded: 8 … 256), BLOCK_N (32, 64, 96, 128), PARTS (1, 2),
// SLABS_PER_STAGE, STAGES, CLUSTER, GATED, TRIGGER_AT_START (launch_dependents before the wait),
// HALF (float16 instead of bfloat16).
#include "common/cluster.cuh"
#include "common/smem_pipeline.cuh"
#include "common/wgmma.cuh"

constexpr int CONSUMERS = BLOCK_M <= 64 ? 1 : BLOCK_M / 64, THREADS = CONSUMERS * 128 + 32;
constexpr u32 X_SLAB = BLOCK_M * 128, W_SLAB = PARTS * BLOCK_N * 128;
constexpr u32 X_BYTES = SLABS_PER_STAGE * X_SLAB, W_BYTES = SLABS_PER_STAGE * W_SLAB,
              AT_W = STAGES * X_BYTES;
constexpr u32 AT_BARRIERS = AT_W + STAGES * W_BYTES;
static_assert(BLOCK_M / CLUSTER % 8 == 0, "a block's share of x is a multiple of 8 rows");
static_assert(BLOCK_M % 64 == 0 || STAGES * W_BYTES >= 8 * SWIZZLE_ATOM_BYTES,
              "a wgmma reads 64 rows of x, which must be allocated");

struct Work {
    const u16* bias;  // of x's type, or null
    u16* out;
    int tokens, n, stages, out_stride;  // n: columns of the output; stages: K in units of a stage
};
static_assert(sizeof(Work) == 32, "gemm.py packs 32 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// As silu_mul of half_types.cuh, with the faster exp2 that flushes denormals.
__device__ inline float silu_mul_fast(float gate, float up) {
    return gate / (1.0f + exp2_fast(-LOG2E * gate)) * up;
}

struct Producer {
    const TensorMap &x_map, &w_map;
    const Work& work;
    Barriers& barriers;
    u32 base, rank;

    __device__ u32 full(int stage) const { return shared_address(&barriers.full[stage]); }

    __device__ void load_w(int stage, int step) const {
        mbarrier_arrive_expect_tx(full(stage), X_BYTES + W_BYTES);
#pragma unroll
        for (int i = 0; i < SLABS_PER_STAGE; ++i) {
            const int column = (step * SLABS_PER_STAGE + i) * 64;
            const u32 target = base + AT_W + stage * W_BYTES + i * W_SLAB;
            if (GATED) {
                tma_load(target, w_map, full(stage), column, blockIdx.x * BLOCK_N);
                tma_load(target + W_SLAB / 2, w_map, full(stage), column,
                         work.n + blockIdx.x * BLOCK_N);
            } else {
                tma_load(target, w_map, full(stage), column, blockIdx.x * (PARTS * BLOCK_N));
            }
        }
    }

    __device__ void load_x(int stage, int step) const {
#pragma unroll
        for (int i = 0; i < SLABS_PER_STAGE; ++i) {
            const int column = (step * SLABS_PER_STAGE + i) * 64, row = rank * (BLOCK_M / CLUSTER);
            const u32 target = base + stage * X_BYTES + i * X_SLAB + row * 128;
            if (CLUSTER > 1)
                tma_load_multicast(target, x_map, full(stage), column, row, (1 << CLUSTER) - 1);
            else
                tma_load(target, x_map, full(stage), column, row);
        }
    }

    __device__ void run() const {
        const int ahead = work.stages < STAGES ? work.stages : STAGES;
        for (int i = 0; i < ahead; ++i) load_w(i, i);
        if (TRIGGER_AT_START) pdl_launch_dependents();
        pdl_wait();
        if (!TRIGGER_AT_START) pdl_launch_dependents();
        for (int i = 0; i < ahead; ++i) load_x(i, i);
        int stage = 0;
        u32 parity = 0;
        for (int step = STAGES; step < work.stages; ++step) {
            mbarrier_wait(shared_address(&barriers.empty[stage]), parity);
            load_w(stage, step);
            load_x(stage, step);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
};

__device__ void consume(const Work& work, Barriers& barriers, int consumer) {
    const u32 base = shared_address(shared);
    const int thread = threadIdx.x % 128, lane = thread % 32;
    float d[PARTS][BLOCK_N / 2];
    int stage = 0, last = -1;
    u32 parity = 0;
    for (int step = 0; step < work.stages; ++step) {
        mbarrier_wait(shared_address(&barriers.full[stage]), parity);
        const u32 x = base + stage * X_BYTES + consumer * 64 * 128,
                  w = base + AT_W + stage * W_BYTES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < SLABS_PER_STAGE * 4; ++i) {
            const u64 left =
                k_major_descriptor(x + i / 4 * X_SLAB + i % 4 * 32, SWIZZLE_ATOM_BYTES);
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                wgmma(d[part], left,
                      k_major_descriptor(w + i / 4 * W_SLAB + part * (BLOCK_N * 128) + i % 4 * 32,
                                         SWIZZLE_ATOM_BYTES),
                      step > 0 || i > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();  // those of the previous step
        if (last >= 0 && lane < CLUSTER)
            mbarrier_arrive_cluster(shared_address(&barriers.empty[last]), lane);
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
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            const int column = (blockIdx.x * OUTPUTS + part) * BLOCK_N + 8 * i + 2 * (lane % 4);
            if (column >= work.n) continue;
            float add[2] = {0.0f, 0.0f}, more[2] = {0.0f, 0.0f};
            if (work.bias != nullptr) {
                add[0] = to_float(work.bias[column]), add[1] = to_float(work.bias[column + 1]);
                if (GATED)
                    more[0] = to_float(work.bias[work.n + column]),
                    more[1] = to_float(work.bias[work.n + column + 1]);
            }
#pragma unroll
            for (int down = 0; down < 2; ++down) {
                const int token = row + 8 * down;
                u32 both = rounded_pair(d[part][4 * i + 2 * down] + add[0],
                                        d[part][4 * i + 2 * down + 1] + add[1]);
                if (GATED) {
                    const u32 up = rounded_pair(d[PARTS - 1][4 * i + 2 * down] + more[0],
                                                d[PARTS - 1][4 * i + 2 * down + 1] + more[1]);
                    both =
                        rounded_pair(silu_mul_fast(to_float(both & 0xFFFF), to_float(up & 0xFFFF)),
                                     silu_mul_fast(to_float(both >> 16), to_float(up >> 16)));
                }
                if (token < work.tokens)
                    *reinterpret_cast<u32*>(
                        work.out + static_cast<long long>(token) * work.out_stride + column) = both;
            }
        }
    }
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(THREADS, 1)
        gemm_small_m(const __grid_constant__ TensorMap x_map,
                     const __grid_constant__ TensorMap w_map, const __grid_constant__ Work work) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + AT_BARRIERS);
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4 * CLUSTER);  // one arrival per consumer warp of each block
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
            Producer{x_map,
                     w_map,
                     work,
                     barriers,
                     shared_address(shared),
                     CLUSTER > 1 ? cluster_rank() : 0}
                .run();
        __syncwarp();
    } else {
        consume(work, barriers, group);
    }
    // no block may exit while multicasts or remote arrivals target it
    if (CLUSTER > 1) cluster_sync_relaxed();
}
