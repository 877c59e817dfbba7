// What products of a few rows of x with 4- or 8-bit weights share: which rows of the weight a block has, its scales in
// shared memory, how pieces of the weight are on their way before x may be read, and how the warps' sums become the output.
//
// A block has 8 warps: RW of them take 16 weight rows each (tile_rows.cuh), the other factor splits K. The columns of a
// tile of 8 rows of x are those of mma.cuh.
//
// Macros: NT (tiles of 8 rows of x), RW (warps along N), DEPTH (pieces that a warp has on their way), and those of
// tile_rows.cuh, weight_only_types.cuh and half_types.cuh.
#pragma once
#include "mma.cuh"
#include "weight_only_types.cuh"
#include "tile_rows.cuh"

constexpr int WARPS = 8, KW = WARPS / RW, THREADS = 32 * WARPS;

// Of the block's weight rows, 0 … 16 RW − 1, the one in memory.
__device__ inline int row_of(int mine, int rows) { return weight_row<16 * RW>(blockIdx.x, mine, rows); }

// Where a thread stands: its warp along K, its quad and its place in it (mma.cuh), the quad's two rows of the weight, and
// the first of these among the block's; the second is 8 further on.
struct ThreadTile {
    int along_k, quad, place, mine;
    long long low, high;
};

__device__ __forceinline__ ThreadTile thread_tile(int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, mine = warp % RW * 16 + quad;
    return {warp / RW, quad, lane % 4, mine, row_of(mine, rows), row_of(mine + 8, rows)};
}

// This thread's rows of x, ``stride`` apart, null where there is no such row.
template <typename T>
__device__ __forceinline__ void input_row_pointers(const T *(&to)[NT], const T *x, long long stride, int quad, int tokens) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int token = quad + 8 * n;
        to[n] = token < tokens ? x + token * stride : nullptr;
    }
}

// COUNT words (1, 2, 4) of the weight, each of which is read once.
template <int COUNT> __device__ __forceinline__ void fetch_words(u32 *to, const u32 *from) {
    if constexpr (COUNT == 4) {
        const uint4 got = load_once(reinterpret_cast<const uint4 *>(from));
        to[0] = got.x, to[1] = got.y, to[2] = got.z, to[3] = got.w;
    } else if constexpr (COUNT == 2) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    } else {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    }
}

// This warp's pieces, number ``first`` and every KW-th behind it: DEPTH of them are on their way before ``ready()``, and
// always from then on. ``fetch(piece, number)``, ``add(piece, number)``.
template <typename KTile, typename Fetch, typename Ready, typename Add>
__device__ __forceinline__ void pipelined_k_loop(int first, int pieces, Fetch fetch, Ready ready, Add add) {
    KTile ahead[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        const int number = first + s * KW;
        if (number < pieces) fetch(ahead[s], number);
    }
    ready();
    for (int start = first; start < pieces; start += DEPTH * KW) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int number = start + s * KW, next = number + DEPTH * KW;
            if (number < pieces) {
                const KTile piece = ahead[s];
                if (next < pieces) fetch(ahead[s], next);
                add(piece, number);
            }
        }
    }
}

// {scale, offset} of the block's rows, as float32, a row `groups + 1` pairs apart (then no two rows of a quad's column
// share a bank). step: what both are multiplied with in each group, or null.
__device__ inline void stage_scales(float2 *to, const ScaleT *scale, const ScaleT *offset, const float *step, int rows,
                                   int groups) {
    for (int i = threadIdx.x; i < 16 * RW * groups; i += THREADS) {
        const int mine = i / groups, g = i - mine * groups;
        const long long at = static_cast<long long>(row_of(mine, rows)) * groups + g;
        const float by = step ? step[g] : 1.0f;
        to[mine * (groups + 1) + g] = {scale_to_float(scale[at]) * by, offset ? scale_to_float(offset[at]) * by : 0.0f};
    }
    __syncthreads();
}

// With one row of x a step is many small blocks, which may fill whatever is free; with more rows they would crowd.
__device__ inline void pdl_enter(int tokens) {
    if (NT == 1 && tokens == 1) {
        pdl_launch_dependents();
    }
    pdl_wait();
    if (tokens > 1) {
        pdl_launch_dependents();
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
