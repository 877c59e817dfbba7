// Mapping from tile rows to weight rows, and the streaming load of weights, for the small-M
//     kernels.
//
// Computes: the weight row of [N, K] that a tile row of a quad of threads is
// Dtypes: any (16-byte loads)
// Layout: groups of 16 tile rows, of which a quad owns rows quad and quad + 8
// Range: any N; with GATED the first 8 of a group are gate rows and the others the matching up rows
// Technique: streaming loads without L1 allocation
// Used by: weight_only.cuh
//
// Rows are processed in groups of 16, of which a quad of threads owns rows `quad` and `quad + 8`.
// With GATED (fused SwiGLU) the first 8 are gate rows and the other 8 the matching up rows of the
// second half of the weight, so that one thread ends with both values of an output.
//
// Macro: GATED.
#pragma once
#include "common/hopper.cuh"

// Weight row in memory of row `local_row` (0 … ROWS − 1) of a block's tile; rows past the end
// repeat the last row.
template <int ROWS> __device__ inline int weight_row(int block, int local_row, int rows) {
    if (GATED) {
        const int gate_row = (block * (ROWS / 16) + local_row / 16) * 8 + local_row % 8,
                  half = rows / 2;
        return min(gate_row, half - 1) + (local_row % 16 >= 8 ? half : 0);
    }
    return min(block * ROWS + local_row, rows - 1);
}

// Loads 16 bytes without allocating in L1: weights are read once and must not evict x.
__device__ inline uint4 load_once(const uint4* from) {
    uint4 loaded;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.x), "=r"(loaded.y), "=r"(loaded.z), "=r"(loaded.w)
                 : "l"(from));
    return loaded;
}
