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

// Partial softmax results of HEADS query heads per warp, then merged over the block: accumulators O
// (relative to 2^row_max), row maxima (base-2 exponents) and row sums.
template <int HEADS> struct Parts {
    float acc[WARPS][HEADS][DIM], row_max[WARPS][HEADS], row_sum[WARPS][HEADS];
    float block_acc[HEADS][DIM], block_max[HEADS], block_sum[HEADS];
};

template <int HEADS> __device__ inline void join_warps(Parts<HEADS>& parts) {
    for (int i = threadIdx.x; i < HEADS * DIM; i += 32 * WARPS) {
        const int head = HEADS > 1 ? i / DIM : 0, d = HEADS > 1 ? i % DIM : i;
        float row_max = parts.row_max[0][head];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp)
            row_max = fmaxf(row_max, parts.row_max[warp][head]);
        float sum = 0.0f, row_sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float share = exp2_fast(parts.row_max[warp][head] - row_max);
            sum += parts.acc[warp][head][d] * share, row_sum += parts.row_sum[warp][head] * share;
        }
        parts.block_acc[head][d] = sum;
        if (d == 0) parts.block_max[head] = row_max, parts.block_sum[head] = row_sum;
    }
}

// Merges the blocks of the cluster and stores this block's share of the output [HEADS, DIM]. unit:
// the value that stands for a weight of 1 in the accumulators.
template <int HEADS>
__device__ inline void finish(const Parts<HEADS>& parts, u16* out, int rank, float unit) {
    constexpr int EACH = HEADS * DIM / SPLITS;
    for (int i = rank * EACH + threadIdx.x; i < (rank + 1) * EACH; i += 32 * WARPS) {
        const int head = HEADS > 1 ? i / DIM : 0, d = HEADS > 1 ? i % DIM : i;
        float row_max = -1e30f;
        float row_maxes[SPLITS];
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            row_maxes[split] =
                SPLITS > 1 ? dsmem_load(&parts.block_max[head], split) : parts.block_max[head];
            row_max = fmaxf(row_max, row_maxes[split]);
        }
        float sum = 0.0f, row_sum = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            const float share = exp2_fast(row_maxes[split] - row_max);
            sum += (SPLITS > 1 ? dsmem_load(&parts.block_acc[head][d], split)
                               : parts.block_acc[head][d]) *
                   share;
            row_sum +=
                (SPLITS > 1 ? dsmem_load(&parts.block_sum[head], split) : parts.block_sum[head]) *
                share;
        }
        out[i] = rounded(sum / (unit * (row_sum == 0.0f ? 1.0f : row_sum)));
    }
}

// Joins the warps' results, then the blocks', and stores the output [HEADS, DIM].
template <int HEADS>
__device__ inline void join_and_finish(Parts<HEADS>& parts, u16* out, int rank, float unit) {
    __syncthreads();
    join_warps(parts);
    if (SPLITS > 1)
        cluster_sync();
    else
        __syncthreads();
    finish(parts, out, rank, unit);
    if (SPLITS > 1) cluster_sync();  // no block may exit while others read its shared memory
}
