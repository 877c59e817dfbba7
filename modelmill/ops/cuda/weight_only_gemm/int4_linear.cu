// Weight-only int4 GEMM for few rows, bound by weight bandwidth.
//
// Computes: out[M, N] = sum over groups of scale · (x · codes) + offset · sum(x) (+ bias[N]), M ≤ 8
//     · M_TILES; with GATED SwiGLU of the two halves of N
// Dtypes: x and out bfloat16 or float16; packed int4 codes; float16 scales and offsets; float32
//     sums
// Layout: x and out row-major; codes [N, K / 2] (32 columns in 16 bytes: byte j has column j in its
//     low nibble and column j + 16 in its high nibble); scales and offsets [N, groups]
// Range: 1 ≤ M ≤ 64 where wq_gemv.cu, wq_gemm_small_m.cu and wq_gemm_pipelined.cu do not apply; K
//     a multiple of 32
// Technique: mma.sync m16n8k16, register prefetch of PREFETCH K tiles, PDL
// Ops: int4_linear, int4_linear_swiglu (launched by int4_linear.py)
//
// 32 columns are packed in 16 bytes: byte j has column j in its low nibble and column j + 16 in its
// high nibble. Each quad loads a K tile of two weight rows, a quarter per thread, 16 bytes at a
// time for K tiles of 128 columns. x is permuted along K in the same way, so the registers are the
// A fragment of mma.m16n8k16 without shuffles (mma.cuh). Codes are dequantized as in
// dequant_int4.cuh; sum(x), needed for MAGIC and the offsets, is one more mma with ones as A.
//
// Macros: those of weight_only.cuh, OFFSET (0: symmetric), K_TILE (columns: 128, 64 or 32), BLOCKS
// (per SM, for __launch_bounds__).
#include "weight_only_gemm/dequant_int4.cuh"
#include "weight_only_gemm/weight_only.cuh"

constexpr int WORDS = K_TILE / 32;  // of a thread's quarter of a K tile

using KTile = WeightTile<u32, WORDS>;  // a thread's quarter of it
using Pointers = ThreadPointers<u32, u16>;

__device__ inline void fetch(KTile& tile, const Pointers& at, int k_tile, bool in_bounds) {
    if (in_bounds) {
        fetch_words<WORDS>(tile.low, at.low + 4 * WORDS * k_tile);
        fetch_words<WORDS>(tile.high, at.high + 4 * WORDS * k_tile);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            tile.low[i] = tile.high[i] = 0;
        }
    }
}

// Columns 4 i … 4 i + 3 (near) and those + 16 (far), two words each.
struct Four {
    u32 near[2], far[2];
};

// Loads the columns of a row of x that are multiplied with one or two words of a thread's quarter.
__device__ inline void fetch_x(Four (&to)[2], const u16* from, bool in_bounds) {
    const uint4 zero = {0, 0, 0, 0};
    const uint4* at = reinterpret_cast<const uint4*>(from);
    const uint4 near = in_bounds ? at[0] : zero, far = in_bounds ? at[2] : zero;
    to[0] = {{near.x, near.y}, {far.x, far.y}};
    to[1] = {{near.z, near.w}, {far.z, far.w}};
}

__device__ inline void fetch_x(Four (&to)[1], const u16* from, bool in_bounds) {
    const uint2 zero = {0, 0};
    const uint2* at = reinterpret_cast<const uint2*>(from);
    const uint2 near = in_bounds ? at[0] : zero, far = in_bounds ? at[4] : zero;
    to[0] = {{near.x, near.y}, {far.x, far.y}};
}

// total += 16 weight rows times up to 8 M_TILES rows of x, for one K tile.
__device__ inline void add(float (&total)[M_TILES][4], const KTile& tile, const Pointers& at,
                           int k_tile, bool in_bounds, int group) {
    constexpr int WORDS_PER_LOAD = WORDS > 1 ? 2 : 1;  // words per 16 bytes of x
    float part[M_TILES][4] = {}, sums[M_TILES][4] = {};
#pragma unroll
    for (int j = 0; j < WORDS / WORDS_PER_LOAD; ++j) {
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
            Four x[WORDS_PER_LOAD];
            fetch_x(x, at.x[n] + K_TILE * k_tile + 8 * j, in_bounds && at.x[n]);
#pragma unroll
            for (int i = 0; i < WORDS_PER_LOAD; ++i) {
                const u32 a = tile.low[WORDS_PER_LOAD * j + i],
                          b = tile.high[WORDS_PER_LOAD * j + i];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    // columns (0, 2) or (1, 3) of the word's four, near and far
                    const u32 pick = odd ? 0x7632u : 0x5410u;
                    const u32 b0 = __byte_perm(x[i].near[0], x[i].near[1], pick);
                    const u32 b1 = __byte_perm(x[i].far[0], x[i].far[1], pick);
                    mma(part[n], biased_int4_pair(a, 8 * odd), biased_int4_pair(b, 8 * odd),
                        biased_int4_pair(a, 8 * odd + 4), biased_int4_pair(b, 8 * odd + 4), b0, b1);
                    mma(sums[n], ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, b0, b1);
                }
            }
        }
    }
    const float2 first = at.grid_low[group], second = at.grid_high[group];
    const float base_low = (OFFSET ? first.y : -INT4_ZERO_POINT * first.x) - MAGIC * first.x;
    const float base_high = (OFFSET ? second.y : -INT4_ZERO_POINT * second.x) - MAGIC * second.x;
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            total[n][c] += first.x * part[n][c] + base_low * sums[n][c];
            total[n][2 + c] += second.x * part[n][2 + c] + base_high * sums[n][c];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int4_linear(const __grid_constant__ WeightOnlyWork w) {
    extern __shared__ float2 grids[];
    const ThreadTile me = thread_tile(w.rows);
    Pointers at = {w.weight + me.low * w.row_length * 4 + me.quad_lane * WORDS,
                   w.weight + me.high * w.row_length * 4 + me.quad_lane * WORDS,
                   grids + me.local_row * (w.groups + 1),
                   grids + (me.local_row + 8) * (w.groups + 1)};
    // the first column of this thread's quarter
    const int column = K_TILE == 128  ? 32 * me.quad_lane
                       : K_TILE == 64 ? me.quad_lane / 2 * 32 + me.quad_lane % 2 * 8
                                      : 4 * me.quad_lane;
    input_row_pointers(at.x, w.x + column, w.x_stride, me.quad, w.tokens);
    const int num_tiles = (w.row_length - column / 32 + WORDS - 1) / WORDS;
    const int k_tiles = (w.row_length + WORDS - 1) / WORDS;
    float total[M_TILES][4] = {};
    pipelined_k_loop<KTile>(
        me.warp_k, k_tiles,
        [&](KTile& tile, int k_tile) { fetch(tile, at, k_tile, k_tile < num_tiles); },
        [&] {
            stage_scales(grids, w.scale, OFFSET ? w.offset : nullptr, nullptr, w.rows, w.groups);
            pdl_enter(w.tokens);
        },
        [&](const KTile& tile, int k_tile) {
            add(total, tile, at, k_tile, k_tile < num_tiles, k_tile >> w.shift);
        });
    finish(total, nullptr, w.bias, w.out, w.rows, w.tokens);
}
