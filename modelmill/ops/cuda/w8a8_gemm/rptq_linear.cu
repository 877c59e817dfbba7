// RPTQ integer GEMM for few rows, bound by weight bandwidth.
//
// Computes: out[M, N] = sum over groups g of step_g · (scale · (q_g · w_g) + offset · sum(q_g)) +
//     constant[N] (+ bias[N]), M ≤ 8 · M_TILES
// Dtypes: q int8; w int8 or packed int4; int32 sums of a K tile, float32 sums of groups; out
//     bfloat16, float16 or float32
// Layout: q[M, K], weights [N, K] row-major (PACKED: byte j of 16 has column j in its low nibble,
//     column j + 16 in its high nibble); scales and offsets [N, groups] float16 or float32
// Range: 2 ≤ M ≤ 64 (M = 1 where wq_gemv.cu does not apply); K a multiple of 128; groups of 128,
//     256, 512 … columns or of all
// Technique: int8 mma.sync m16n8k32, register prefetch of PREFETCH K tiles, PDL
// Ops: rptq_linear (launched by rptq_linear.py)
//
// Each quad loads 128 columns of two weight rows, 16 bytes at a time; q is permuted along K in the
// same way, so the registers are the A fragment of mma.m16n8k32 (mma.cuh). Packed codes (PACKED:
// byte j of 16 has column j in its low nibble, column j + 16 in its high nibble) are unpacked by
// one mask. Sums of a K tile are integers below 2^24, exact in float32; each is flushed at once.
//
// Macros: those of weight_only.cuh, PACKED, OFFSET, DYNAMIC (a step per row of q and group), BLOCKS
// (per SM, for __launch_bounds__).
#include "weight_only_gemm/dequant_int4.cuh"
#include "weight_only_gemm/weight_only.cuh"

constexpr int COLUMNS = 128;           // of a K tile
constexpr int LOADS = PACKED ? 1 : 2;  // 16-byte loads of a thread for a K tile of one weight row
constexpr u32 ONES = 0x01010101u;      // four bytes of 1

struct Work {
    const uint4* q;
    const uint4* weight;
    const ScaleT *scale, *offset;  // [N, groups]
    const float* step;             // [groups] or [T, groups]
    const float* constant;         // [N], or null
    const Out* bias;               // or null
    Out* out;
    int tokens, rows, columns, groups;
    int shift;  // log2 of the K tiles that share a scale
};
static_assert(sizeof(Work) == 88, "rptq_linear.py packs 88 bytes");

using KTile = WeightTile<uint4, LOADS>;
using Pointers = ThreadPointers<uint4, uint4>;

__device__ inline void fetch(KTile& tile, const Pointers& at, int k_tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        tile.low[i] = load_once(at.low + 4 * (LOADS * k_tile + i));
        tile.high[i] = load_once(at.high + 4 * (LOADS * k_tile + i));
    }
}

// part, sums += two words of two weight rows (eight columns of a thread) times as many of q.
__device__ inline void add_words(int (&part)[4], int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3,
                                 u32 b0, u32 b1) {
    mma(part, a0, a1, a2, a3, b0, b1);
    if (OFFSET) {
        mma(sums, ONES, ONES, ONES, ONES, b0, b1);
    }
}

__device__ inline void load_q(u32 (&q)[8], const uint4* from, int k_tile) {
    // packed: 32 adjacent columns; else 16 and the 16 at + 64
    const uint4 zero = {0, 0, 0, 0};
    const uint4 first = from ? from[8 * k_tile] : zero,
                second = from ? from[8 * k_tile + (PACKED ? 1 : 4)] : zero;
    const u32 words[8] = {first.x,  first.y,  first.z,  first.w,
                          second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        q[i] = words[i];
    }
}

__device__ inline void add(float (&total)[M_TILES][4], const KTile& tile, const Pointers& at,
                           int k_tile, int group, const float* steps, int groups, int tokens) {
    const float2 first = at.grid_low[group], second = at.grid_high[group];
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
        u32 q[8];
        load_q(q, at.x[n], k_tile);
        int part[4] = {}, sums[4] = {};
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const u32 low[4] = {tile.low[i].x, tile.low[i].y, tile.low[i].z, tile.low[i].w};
            const u32 high[4] = {tile.high[i].x, tile.high[i].y, tile.high[i].z, tile.high[i].w};
            if (PACKED) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    add_words(part, sums, low[j] & LOW_NIBBLES, high[j] & LOW_NIBBLES,
                              (low[j] >> 4) & LOW_NIBBLES, (high[j] >> 4) & LOW_NIBBLES, q[j],
                              q[j + 4]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    add_words(part, sums, low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1],
                              q[4 * i + 2 * j], q[4 * i + 2 * j + 1]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float mine = first.x * static_cast<float>(part[c]),
                  other = second.x * static_cast<float>(part[2 + c]);
            if (OFFSET) {
                mine += first.y * static_cast<float>(sums[c]);
                other += second.y * static_cast<float>(sums[c]);
            }
            if (DYNAMIC) {
                const int token =
                    min(8 * n + 2 * static_cast<int>(threadIdx.x % 4) + c, tokens - 1);
                const float step = steps[static_cast<long long>(token) * groups + group];
                mine *= step;
                other *= step;
            }
            total[n][c] += mine;
            total[n][2 + c] += other;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    rptq_linear(const __grid_constant__ Work w) {
    extern __shared__ float2 grids[];
    const ThreadTile me = thread_tile(w.rows);
    const int width = w.columns / (PACKED ? 32 : 16), k_tiles = w.columns / COLUMNS;
    Pointers at = {w.weight + me.low * width + me.quad_lane,
                   w.weight + me.high * width + me.quad_lane, grids + me.local_row * (w.groups + 1),
                   grids + (me.local_row + 8) * (w.groups + 1)};
    const int part = me.quad_lane * (PACKED ? 2 : 1), row = w.columns / 16;
    if constexpr (M_TILES == 1 && PREFETCH == 1) {
        // this config has no spare registers: adding the thread's offset last saves three
        const uint4* mine = w.q + static_cast<long long>(me.quad) * row + part;
        at.x[0] = me.quad < w.tokens ? mine : nullptr;
    } else {
        input_row_pointers(at.x, w.q + part, row, me.quad, w.tokens);
    }
    float total[M_TILES][4] = {};
    pipelined_k_loop<KTile>(
        me.warp_k, k_tiles, [&](KTile& tile, int k_tile) { fetch(tile, at, k_tile); },
        [&] {
            // static steps are stored with the weight; dynamic ones are outputs of the previous
            // kernel
            stage_scales(grids, w.scale, OFFSET ? w.offset : nullptr, DYNAMIC ? nullptr : w.step,
                         w.rows, w.groups);
            pdl_enter(w.tokens);
        },
        [&](const KTile& tile, int k_tile) {
            add(total, tile, at, k_tile, k_tile >> w.shift, w.step, w.groups, w.tokens);
        });
    finish(total, w.constant, w.bias, w.out, w.rows, w.tokens);
}
