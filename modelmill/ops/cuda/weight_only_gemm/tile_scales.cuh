// Scales of a tile of 16 weight rows, to shared memory.
//
// Computes: copies of the scales and offsets of the tile's rows: [2][8 rows][groups] scales, then
//     offsets
// Dtypes: float16, with SCALE_FP32 float32
// Layout: scales and offsets [N, groups] in global memory, 16-byte aligned
// Range: N a multiple of 16
// Technique: bulk copies, mbarrier
// Used by: wq_gemm_small_m.cu, wq_gemv.cu
//
// Macros: GATED (eight rows are gate rows, the others the matching up rows), OFFSET (0: symmetric),
// SCALE_FP32. `Work` has rows, groups, scale and offset.
#pragma once
#include "common/hopper.cuh"
#include "weight_only_gemm/weight_only_types.cuh"

// Bytes of the scales, or offsets, of eight weight rows; of all of a tile.
template <typename Work> __device__ inline u32 half_scale_bytes(const Work& w) {
    return 8 * w.groups * sizeof(ScaleT);
}

template <typename Work> __device__ inline u32 tile_scale_bytes(const Work& w) {
    return (OFFSET ? 4 : 2) * half_scale_bytes(w);
}

// First weight row of half a tile: rows 0 … 7 or 8 … 15.
template <typename Work> __device__ inline int first_row(const Work& w, int tile, int half) {
    return GATED ? tile * 8 + half * (w.rows / 2) : tile * 16 + half * 8;
}

// Called by one thread; the mbarrier `full` counts the bytes.
template <typename Work>
__device__ inline void load_tile_scales(const Work& w, u32 target, u32 full, int tile) {
    const u32 each = half_scale_bytes(w);
    mbarrier_arrive_expect_tx(full, each * (OFFSET ? 4 : 2));
    for (int half = 0; half < 2; ++half) {
        const long long at = static_cast<long long>(first_row(w, tile, half)) * w.groups;
        bulk_load(target + half * each, w.scale + at, each, full);
        if (OFFSET) bulk_load(target + (2 + half) * each, w.offset + at, each, full);
    }
}
