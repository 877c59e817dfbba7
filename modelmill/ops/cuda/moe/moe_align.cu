// Pairs of a token and an expert sorted by expert, in one block.
//
// Computes: sorted_token_ids and expert_ids of topk_ids[M, top_k] (ops/moe_align_block_size.py)
// Dtypes: int32
// Layout: packed; each expert's pairs padded to whole blocks
// Range: M · top_k ≤ 8192 pairs; E ≤ 1024 (chosen: ≤ 128)
// Technique: ranks within warps by shuffles, a histogram for each warp, no atomics, PDL
// Ops: moe_align_block_size (launched by moe_align_block_size.py)
//
// Each warp ranks 32 neighbouring pairs at a time among those of its own before them; then a thread
// for each expert adds the warps' counts. The order of an expert's pairs is that of the tokens.
#include "common/hopper.cuh"

constexpr int WARPS = 32, THREADS = 32 * WARPS;
constexpr int MAX_STEPS = 8;  // of 32 pairs for a warp
constexpr int MAX_EXPERTS = 1024;

struct Work {
    const int* ids;
    int *sorted_ids, *expert_ids;
    int pairs, experts, block_size, blocks;
};
static_assert(sizeof(Work) == 40, "moe_align_block_size.py packs 40 bytes");

extern __shared__ __align__(1024) unsigned char shared[];

// This lane's rank among the warp's earlier pairs of its expert; adds the 32 pairs to the counts.
__device__ inline int rank_of(int* own, int id) {
    const int lane = threadIdx.x % 32;
    int same = 0, earlier = 0;
#pragma unroll
    for (int other = 0; other < 32; ++other) {
        const int equal = __shfl_sync(~0u, id, other) == id;
        same += equal;
        earlier += equal && other < lane;
    }
    const int before = id >= 0 ? own[id] : 0;
    __syncwarp();
    if (id >= 0 && earlier == same - 1) own[id] = before + same;
    __syncwarp();
    return before + earlier;
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_align(const __grid_constant__ Work w) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* counts = reinterpret_cast<int*>(shared);  // [WARPS][experts]
    int *own = counts + warp * w.experts, *padded = counts + WARPS * w.experts;
    for (int i = lane; i < w.experts; i += 32) own[i] = 0;
    __syncwarp();
    pdl_wait();
    pdl_launch_dependents();
    const int steps = (w.pairs + THREADS - 1) / THREADS, first = warp * steps * 32 + lane;
    int place[MAX_STEPS];  // expert and rank, or −1
#pragma unroll
    for (int s = 0; s < MAX_STEPS; ++s) {
        const int pair = first + 32 * s;
        place[s] = s < steps && pair < w.pairs ? w.ids[pair] : -1;
    }
#pragma unroll
    for (int s = 0; s < MAX_STEPS; ++s) {
        if (s >= steps) continue;
        const int rank = rank_of(own, place[s]);
        if (place[s] >= 0) place[s] += rank * MAX_EXPERTS;
    }
    __syncthreads();
    const int expert = threadIdx.x;
    int total = 0, before[WARPS];  // pairs of the warps in front
    if (expert < w.experts) {
#pragma unroll
        for (int k = 0; k < WARPS; ++k) before[k] = counts[k * w.experts + expert];
#pragma unroll
        for (int k = 0; k < WARPS; ++k) {
            const int mine = before[k];
            before[k] = total, total += mine;
        }
        padded[expert] = (total + w.block_size - 1) / w.block_size * w.block_size;
    }
    __syncthreads();
    int start = 0, used = 0;
#pragma unroll 8
    for (int i = 0; i < w.experts; ++i) {
        start += i < expert ? padded[i] : 0;
        used += padded[i];
    }
    if (expert < w.experts) {
#pragma unroll
        for (int k = 0; k < WARPS; ++k) counts[k * w.experts + expert] = start + before[k];
        const int end = start + padded[expert];
        for (int i = start + total; i < end; ++i) w.sorted_ids[i] = w.pairs;
        for (int i = start; i < end; i += w.block_size) w.expert_ids[i / w.block_size] = expert;
    }
    for (int i = used + threadIdx.x; i < w.blocks * w.block_size; i += THREADS)
        w.sorted_ids[i] = w.pairs;
    for (int i = used / w.block_size + threadIdx.x; i < w.blocks; i += THREADS)
        w.expert_ids[i] = -1;
    __syncthreads();
#pragma unroll
    for (int s = 0; s < MAX_STEPS; ++s)
        if (place[s] >= 0)
            w.sorted_ids[own[place[s] % MAX_EXPERTS] + place[s] / MAX_EXPERTS] = first + 32 * s;
}
