// Shared parts of the decode attention kernels: streaming loads of keys and values, and the merge
//     of partial softmax results.
//
// Computes: out[heads · DIM] from the partial maxima, sums and outputs of warps (shared memory) and
//     of the blocks of a cluster (DSMEM)
// Dtypes: partial results float32; out bfloat16 or float16
// Layout: partial results per warp in shared memory
// Range: DIM 64 … 256, SPLITS 1, 2, 4 or 8 blocks of a cluster
// Technique: split-KV, thread-block cluster (DSMEM), streaming loads
// Used by: paged_decode16.cu, paged_decode8.cu
//
// Macros: DIM, WARPS, SPLITS.
#pragma once
#include "common/cluster.cuh"
#include "common/half_types.cuh"

// Loads without allocating in L1: keys and values are read once and must not evict tables and
// scales.
__device__ inline void load_streaming(u32 (&to)[4], const void* from) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
}

__device__ inline void load_streaming(u32 (&to)[2], const void* from) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "l"(from));
}

__device__ inline void load_streaming(u32 (&to)[1], const void* from) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// What a lane computes: its blocks of KEYS keys [block, end) of one sequence's head, every
// WARPS-th; visible keys are first … length − 1. g, p: its row and column in an MMA fragment.
struct Share {
    int split, sequence, head, warp, g, p, row, rows, length, first, end, block;
};

template <int KEYS, class Work> __device__ inline Share share_of_lane(const Work& w, int heads) {
    const int split = SPLITS > 1 ? cluster_rank() : 0, pair = blockIdx.x / SPLITS;
    const int sequence = pair / heads, head = pair - sequence * heads;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, p = threadIdx.x % 4;
    const int row = w.starts[sequence], rows = w.starts[sequence + 1] - row,
              length = w.lengths[sequence];
    const int first = w.window > 0 ? max(length - w.window, 0) : 0;
    const int begin = first / KEYS, blocks = (length + KEYS - 1) / KEYS - begin,
              each = (blocks + SPLITS - 1) / SPLITS;
    const int end = begin + min((split + 1) * each, blocks), block = begin + split * each + warp;
    return {split, sequence, head, warp, g, p, row, rows, length, first, end, block};
}

// A row's maximum (a base-2 exponent) and the sum of its weights relative to it.
struct RowStats {
    float row_max, row_sum;
};

// Merges the stats of COUNT partial results; weight: what each result is multiplied by.
template <int COUNT, class Stats>
__device__ inline RowStats merge_stats(float (&weight)[COUNT], Stats stats) {
    RowStats merged = {-1e30f, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) merged.row_max = fmaxf(merged.row_max, stats(i).row_max);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        weight[i] = exp2_fast(stats(i).row_max - merged.row_max);
        merged.row_sum += stats(i).row_sum * weight[i];
    }
    return merged;
}

// Partial softmax results of HEADS query heads: accumulators O (relative to 2^row_max) and stats of
// each warp, and of each block of the cluster for the channels that this block stores.
template <int HEADS> struct Parts {
    static constexpr int FOURS = HEADS * DIM / 4, EACH = (FOURS + SPLITS - 1) / SPLITS;
    float acc[WARPS][HEADS][DIM];
    RowStats stats[WARPS][HEADS];
    float4 block_acc[SPLITS > 1 ? SPLITS : 1][SPLITS > 1 ? EACH : 1];
    float4 block_stats[SPLITS > 1 ? SPLITS : 1][SPLITS > 1 ? HEADS : 1];  // row_max, row_sum
    u64 landed;  // the blocks' results, all of them

    // Fours of channels that block `rank` stores.
    __device__ static int num_fours(int rank) { return max(0, min(EACH, FOURS - rank * EACH)); }
};

// Where results go. sinks: a logit of each head that its denominator has beside the keys', with
// HAS_SINKS. unit: the value that stands for a weight of 1 in the accumulators. exponent: row sums
// are 2^exponent times as large.
template <bool HAS_SINKS> struct Output {
    u16* out;
    const float* sinks;
    float unit, exponent;

    // Stores four channels: sum / row_sum.
    __device__ void store(int four, int head, const float (&sum)[4], RowStats stats) const {
        float denominator = stats.row_sum == 0.0f ? 1.0f : stats.row_sum, factor = 1.0f;
        if (HAS_SINKS) {
            const float sink = sinks[head] * LOG2E, most = fmaxf(stats.row_max, sink);
            factor = exp2_fast(stats.row_max - most);
            denominator = stats.row_sum * factor + exp2_fast(sink - most + exponent);
        }
        factor = __fdividef(factor, unit * denominator);
        reinterpret_cast<uint2*>(out)[four] = {rounded_pair(sum[0] * factor, sum[1] * factor),
                                               rounded_pair(sum[2] * factor, sum[3] * factor)};
    }
};

// By all threads, before the first wait: other blocks of the cluster will store to this one.
template <int HEADS> __device__ inline void init_merge(Parts<HEADS>& parts, int rank) {
    if (SPLITS == 1) return;
    if (threadIdx.x == 0) {
        const u32 landed = shared_address(&parts.landed);
        mbarrier_init(landed, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(landed, SPLITS * 16 * (parts.num_fours(rank) + HEADS));
    }
    __syncwarp();
    cluster_arrive_relaxed();
}

// The stats of the warps for a head, and what each warp's accumulators are multiplied by.
template <int HEADS>
__device__ inline RowStats merge_warps(float (&weight)[WARPS], const Parts<HEADS>& parts,
                                       int head) {
    return merge_stats(weight, [&](int warp) { return parts.stats[warp][head]; });
}

// Joins the warps' accumulators. SPLITS > 1: sends each four of channels to the block that stores
// it.
template <int HEADS, bool HAS_SINKS>
__device__ inline void join_warps(Parts<HEADS>& parts, const Output<HAS_SINKS>& output, int rank) {
    for (int four = threadIdx.x; four < parts.FOURS; four += 32 * WARPS) {
        const int head = HEADS > 1 ? 4 * four / DIM : 0, d = HEADS > 1 ? 4 * four % DIM : 4 * four;
        float weight[WARPS], sum[4] = {};
        const RowStats stats = merge_warps(weight, parts, head);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float4 part = *reinterpret_cast<const float4*>(&parts.acc[warp][head][d]);
            sum[0] += part.x * weight[warp], sum[1] += part.y * weight[warp];
            sum[2] += part.z * weight[warp], sum[3] += part.w * weight[warp];
        }
        if (SPLITS > 1)
            dsmem_store_async(sum, shared_address(&parts.block_acc[rank][four % parts.EACH]),
                              shared_address(&parts.landed), four / parts.EACH);
        else
            output.store(four, head, sum, stats);
    }
}

// Sends the stats of this block to all blocks.
template <int HEADS> __device__ inline void send_stats(Parts<HEADS>& parts, int rank) {
    for (int i = threadIdx.x; i < HEADS * SPLITS; i += 32 * WARPS) {
        float weight[WARPS];
        const RowStats stats = merge_warps(weight, parts, i / SPLITS);
        dsmem_store_async({stats.row_max, stats.row_sum, 0.0f, 0.0f},
                          shared_address(&parts.block_stats[rank][i / SPLITS]),
                          shared_address(&parts.landed), i % SPLITS);
    }
}

// Merges the results of the cluster's blocks and stores this block's share of the output.
template <int HEADS, bool HAS_SINKS>
__device__ inline void merge_blocks(const Parts<HEADS>& parts, const Output<HAS_SINKS>& output,
                                    int rank) {
    mbarrier_wait(shared_address(&parts.landed), 0);
    for (int i = threadIdx.x; i < parts.num_fours(rank); i += 32 * WARPS) {
        const int four = rank * parts.EACH + i, head = HEADS > 1 ? 4 * four / DIM : 0;
        float weight[SPLITS], sum[4] = {};
        const RowStats stats = merge_stats(weight, [&](int split) {
            return RowStats{parts.block_stats[split][head].x, parts.block_stats[split][head].y};
        });
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            const float4 part = parts.block_acc[split][i];
            sum[0] += part.x * weight[split], sum[1] += part.y * weight[split];
            sum[2] += part.z * weight[split], sum[3] += part.w * weight[split];
        }
        output.store(four, head, sum, stats);
    }
}

// Joins the warps' results, then the blocks', and stores the output [HEADS, DIM].
template <int HEADS, bool HAS_SINKS>
__device__ inline void join_and_store(Parts<HEADS>& parts, const Output<HAS_SINKS>& output,
                                      int rank) {
    __syncthreads();
    if (SPLITS > 1) cluster_wait();  // every block has initialised its mbarrier
    join_warps(parts, output, rank);
    if (SPLITS > 1) send_stats(parts, rank), merge_blocks(parts, output, rank);
}
