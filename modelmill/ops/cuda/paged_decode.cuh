// What the kernels that decode over pages share (paged_decode8.cu, paged_decode16.cu): reading keys and values, and
// joining what warps and blocks found.
//
// Macros: DIM, WARPS, SPLITS.
#pragma once
#include "cluster.cuh"
#include "half_types.cuh"

// Read once: keys and values should not push page tables and scales out of the nearest cache.
__device__ inline void load_streaming(u32 (&to)[4], const void *from) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from));
}

__device__ inline void load_streaming(u32 (&to)[2], const void *from) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
}

__device__ inline void load_streaming(u32 (&to)[1], const void *from) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// What the warps of a block found of HEADS query heads, and then all of it together: values mixed by weights that are 1
// where the score is the highest (of the power of two ``top``), and the sum of those weights.
template <int HEADS> struct Parts {
    float mixed[WARPS][HEADS][DIM], top[WARPS][HEADS], mass[WARPS][HEADS];
    float whole[HEADS][DIM], whole_top[HEADS], whole_mass[HEADS];
};

template <int HEADS> __device__ inline void join_warps(Parts<HEADS> &found) {
    for (int i = threadIdx.x; i < HEADS * DIM; i += 32 * WARPS) {
        const int head = HEADS > 1 ? i / DIM : 0, d = HEADS > 1 ? i % DIM : i;
        float top = found.top[0][head];
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) top = fmaxf(top, found.top[warp][head]);
        float sum = 0.0f, mass = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float share = exp2_fast(found.top[warp][head] - top);
            sum += found.mixed[warp][head][d] * share, mass += found.mass[warp][head] * share;
        }
        found.whole[head][d] = sum;
        if (d == 0) found.whole_top[head] = top, found.whole_mass[head] = mass;
    }
}

// This block's part of the output, of all blocks of the cluster; its heads lie side by side. one: what a weight of 1 was
// in ``mixed``.
template <int HEADS> __device__ inline void finish(const Parts<HEADS> &found, u16 *out, int rank, float one) {
    constexpr int EACH = HEADS * DIM / SPLITS;
    for (int i = rank * EACH + threadIdx.x; i < (rank + 1) * EACH; i += 32 * WARPS) {
        const int head = HEADS > 1 ? i / DIM : 0, d = HEADS > 1 ? i % DIM : i;
        float top = -1e30f;
        float tops[SPLITS];
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            tops[split] = SPLITS > 1 ? dsmem_load(&found.whole_top[head], split) : found.whole_top[head];
            top = fmaxf(top, tops[split]);
        }
        float sum = 0.0f, mass = 0.0f;
#pragma unroll
        for (int split = 0; split < SPLITS; ++split) {
            const float share = exp2_fast(tops[split] - top);
            sum += (SPLITS > 1 ? dsmem_load(&found.whole[head][d], split) : found.whole[head][d]) * share;
            mass += (SPLITS > 1 ? dsmem_load(&found.whole_mass[head], split) : found.whole_mass[head]) * share;
        }
        out[i] = rounded(sum / (one * (mass == 0.0f ? 1.0f : mass)));
    }
}
