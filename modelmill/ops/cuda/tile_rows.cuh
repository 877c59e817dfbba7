// Which rows of the weight are whose in products of a few rows, and how they are read.
//
// Rows are taken in sixteens, of which a quad of threads holds rows `quad` and `quad + 8`. Where GATED the first eight are
// of the gate and the others the same rows of the half below, so that one thread has both at the end.
//
// Macro: GATED.
#pragma once
#include "hopper.cuh"

// Of a block's ROWS weight rows, 0 … ROWS − 1, the one in memory; those past the end repeat the last.
template <int ROWS>
__device__ inline int weight_row(int block, int mine, int rows) {
    if (GATED) {
        const int own = (block * (ROWS / 16) + mine / 16) * 8 + mine % 8, half = rows / 2;
        return min(own, half - 1) + (mine % 16 >= 8 ? half : 0);
    }
    return min(block * ROWS + mine, rows - 1);
}

// Weights are used once in a step: they should not push x out of the nearest cache.
__device__ inline uint4 load_once(const uint4 *from) {
    uint4 got;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(from));
    return got;
}
