// What products of a few rows of x with 4- or 8-bit weights share: which rows of the weight a block has, its scales in
// shared memory, and how the warps' sums become the output.
//
// A block has 8 warps: RW of them take 16 weight rows each (weight_rows.cuh), the other factor splits K. The columns of a
// tile of 8 rows of x are those of mma.cuh.
//
// Macros: NT (tiles of 8 rows of x), RW (warps along N), and those of weight_rows.cuh, narrow_types.cuh and numbers.cuh.
#pragma once
#include "mma.cuh"
#include "narrow_types.cuh"
#include "weight_rows.cuh"

constexpr int WARPS = 8, KW = WARPS / RW, THREADS = 32 * WARPS;

// Of the block's weight rows, 0 … 16 RW − 1, the one in memory.
__device__ inline int row_of(int mine, int rows) { return weight_row<16 * RW>(blockIdx.x, mine, rows); }

// {scale, offset} of the block's rows, as float32, a row `groups + 1` pairs apart (then no two rows of a quad's column
// share a bank). step: what both are multiplied with in each group, or null.
__device__ inline void stage_grids(float2 *to, const Grid *scale, const Grid *offset, const float *step, int rows,
                                   int groups) {
    for (int i = threadIdx.x; i < 16 * RW * groups; i += THREADS) {
        const int mine = i / groups, g = i - mine * groups;
        const long long at = static_cast<long long>(row_of(mine, rows)) * groups + g;
        const float by = step ? step[g] : 1.0f;
        to[mine * (groups + 1) + g] = {grid_value(scale[at]) * by, offset ? grid_value(offset[at]) * by : 0.0f};
    }
    __syncthreads();
}

// With one row of x a step is many small blocks, which may fill whatever is free; with more rows they would crowd.
__device__ inline void enter(int tokens) {
    if (NT == 1 && tokens == 1) {
        let_next_in();
    }
    after_those_in_front();
    if (tokens > 1) {
        let_next_in();
    }
}

// A sum over the warps along K, with what is added to each output.
__device__ inline float summed(const float (&kept)[WARPS][NT * 4][32], int r, int i, int l, const float *constant,
                               const Out *bias, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < KW; ++k) {
        sum += kept[k * RW + r][i][l];
    }
    if (constant) {
        sum += constant[row];
    }
    return bias ? sum + out_value(bias[row]) : sum;
}

// The block's outputs from each warp's sums: total[n][c] is of tile n of x, row quad + 8 (c / 2), column 2 place + c % 2.
__device__ inline void finish(const float (&total)[NT][4], const float *constant, const Out *bias, Out *out, int rows,
                              int tokens) {
    __shared__ float kept[WARPS][NT * 4][32];
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) {
        kept[threadIdx.x / 32][i][threadIdx.x % 32] = total[i / 4][i % 4];
    }
    __syncthreads();
    constexpr int EACH = GATED ? 2 : 4; // values that a thread of the product holds of a tile, or pairs of them
    const int wide = GATED ? rows / 2 : rows;
    for (int at = threadIdx.x; at < RW * NT * EACH * 32; at += THREADS) {
        const int l = at % 32, e = at / 32 % EACH, n = at / (32 * EACH) % NT, r = at / (32 * EACH * NT), i = n * 4 + e;
        const int row = (blockIdx.x * RW + r) * (GATED ? 8 : 16) + l / 4 + (e >= 2 ? 8 : 0);
        const int token = n * 8 + l % 4 * 2 + e % 2;
        if (row < wide && token < tokens) {
            Out result = as_out(summed(kept, r, i, l, constant, bias, row));
            if (GATED) {
                const Out up = as_out(summed(kept, r, i + 2, l, constant, bias, row + wide));
                result = as_out(gated(out_value(result), out_value(up)));
            }
            out[static_cast<long long>(token) * wide + row] = result;
        }
    }
}
