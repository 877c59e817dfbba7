// Products of a few rows of clustered integers with 8- or 4-bit weights, at the speed of memory:
// y[t, n] = sum over groups g of step_g * (scale * (q_g . w_g) + offset * (sum of q_g)) + constant[n] (+ bias[n]),
// the parts in brackets whole numbers (ops/rptq_linear.py), for up to 8 * NT rows of q.
//
// The four threads of a quad take 128 columns of two weight rows, 16 bytes at a time: their registers are the left operand
// of mma.m16n8k32 as they come, as q comes in the same order (mma.cuh). Packed codes (PACKED: byte j of 16 has column j in
// its low half, column j + 16 in its high half) become bytes by one mask. A piece's sums are whole numbers below 2^24, which
// float32 holds exactly; each is flushed at once.
//
// Every warp has DEPTH pieces on their way before q may be read.
//
// Macros: those of weight_only.cuh, PACKED, OFFSET, DYNAMIC (a step for each row of q and group), BLOCKS (for which a
// multiprocessor's registers must suffice).
#include "dequant_int4.cuh"
#include "weight_only.cuh"

constexpr int COLUMNS = 128; // of a piece
constexpr int LOADS = PACKED ? 1 : 2; // of 16 bytes, for a thread's part of a weight row's piece
constexpr u32 ONES = 0x01010101u; // four bytes of 1

struct Work {
    const uint4 *q;
    const uint4 *weight;
    const ScaleT *scale, *offset; // [N, groups]
    const float *step;          // [groups] or [T, groups]
    const float *constant;      // [N], or null
    const Out *bias;            // or null
    Out *out;
    int tokens, rows, columns, groups;
    int shift; // pieces of 128 columns that share a scale, as a power of two
};
static_assert(sizeof(Work) == 88, "rptq_linear.py packs 88 bytes");

// Where this thread reads, at its part of the first piece.
struct Place {
    const uint4 *low, *high;
    const float2 *grid_low, *grid_high;
    const uint4 *q[NT]; // null: no such row of q
};

struct KTile {
    uint4 low[LOADS], high[LOADS];
};

__device__ inline void fetch(KTile &piece, const Place &at, int number) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        piece.low[i] = load_once(at.low + 4 * (LOADS * number + i));
        piece.high[i] = load_once(at.high + 4 * (LOADS * number + i));
    }
}

// part, sums += two words of two weight rows (eight columns of a thread) times as many of q.
__device__ inline void add_words(int (&part)[4], int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    multiply(part, a0, a1, a2, a3, b0, b1);
    if (OFFSET) {
        multiply(sums, ONES, ONES, ONES, ONES, b0, b1);
    }
}

__device__ inline void load_q(u32 (&q)[8], const uint4 *from, int number) {
    // packed: 32 neighbouring columns; else 16, and the 16 that are 64 further on
    const uint4 zero = {0, 0, 0, 0};
    const uint4 first = from ? from[8 * number] : zero, second = from ? from[8 * number + (PACKED ? 1 : 4)] : zero;
    const u32 words[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        q[i] = words[i];
    }
}

__device__ inline void add(float (&total)[NT][4], const KTile &piece, const Place &at, int number, int group,
                           const float *steps, int groups, int tokens) {
    const float2 first = at.grid_low[group], second = at.grid_high[group];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        u32 q[8];
        load_q(q, at.q[n], number);
        int part[4] = {}, sums[4] = {};
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const u32 low[4] = {piece.low[i].x, piece.low[i].y, piece.low[i].z, piece.low[i].w};
            const u32 high[4] = {piece.high[i].x, piece.high[i].y, piece.high[i].z, piece.high[i].w};
            if (PACKED) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    add_words(part, sums, low[j] & LOWER_CODES, high[j] & LOWER_CODES, (low[j] >> 4) & LOWER_CODES,
                              (high[j] >> 4) & LOWER_CODES, q[j], q[j + 4]);
                }
            } else {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    add_words(part, sums, low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1], q[4 * i + 2 * j],
                              q[4 * i + 2 * j + 1]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float mine = first.x * static_cast<float>(part[c]), other = second.x * static_cast<float>(part[2 + c]);
            if (OFFSET) {
                mine += first.y * static_cast<float>(sums[c]);
                other += second.y * static_cast<float>(sums[c]);
            }
            if (DYNAMIC) {
                const int token = min(8 * n + 2 * static_cast<int>(threadIdx.x % 4) + c, tokens - 1);
                const float step = steps[static_cast<long long>(token) * groups + group];
                mine *= step;
                other *= step;
            }
            total[n][c] += mine;
            total[n][2 + c] += other;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rptq_linear(const __grid_constant__ Work w) {
    extern __shared__ float2 grids[];
    const ThreadTile me = thread_tile(w.rows);
    const int width = w.columns / (PACKED ? 32 : 16), pieces = w.columns / COLUMNS;
    Place at = {w.weight + me.low * width + me.place, w.weight + me.high * width + me.place,
                grids + me.mine * (w.groups + 1), grids + (me.mine + 8) * (w.groups + 1)};
    const int part = me.place * (PACKED ? 2 : 1), row = w.columns / 16;
    if constexpr (NT == 1 && DEPTH == 1) {
        // the form without a register to spare: added last, the thread's part takes three fewer
        const uint4 *mine = w.q + static_cast<long long>(me.quad) * row + part;
        at.q[0] = me.quad < w.tokens ? mine : nullptr;
    } else {
        input_row_pointers(at.q, w.q + part, row, me.quad, w.tokens);
    }
    float total[NT][4] = {};
    pipelined_k_loop<KTile>(
        me.along_k, pieces, [&](KTile &piece, int number) { fetch(piece, at, number); },
        [&] {
            // static steps are the weight's own; those of the tokens are not known yet
            stage_scales(grids, w.scale, OFFSET ? w.offset : nullptr, DYNAMIC ? nullptr : w.step, w.rows, w.groups);
            pdl_enter(w.tokens);
        },
        [&](const KTile &piece, int number) {
            add(total, piece, at, number, number >> w.shift, w.step, w.groups, w.tokens);
        });
    finish(total, w.constant, w.bias, w.out, w.rows, w.tokens);
}
