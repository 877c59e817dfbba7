// Products of a few rows with 4-bit weights, at the speed of memory: y[t, n] = sum over groups of
// scale * (x . codes) + offset * (sum of x), for up to 8 * NT rows of x, in 16 bits.
//
// A run of 32 columns lies in 16 bytes: byte j has column j in its low half and column j + 16 in its high half
// (ops/int4_linear.py). The four threads of a quad take a piece of two weight rows, a quarter each, 16 bytes at a time
// where a piece is 128 columns. A quad's registers are, without a move between threads, the left operand of mma.m16n8k16,
// as x comes in the same order (mma.cuh).
//
// A code becomes a number as dequant_int4.cuh tells. The sum of x, which takes out what that adds and which the offsets need
// anyway, is one more product, with ones in the place of the weights: so it comes in the layout of the sums.
//
// Every warp has DEPTH pieces on their way before x may be read.
//
// Macros: those of weight_only.cuh, OFFSET (0: symmetric), PIECE (columns: 128, 64 or 32), BLOCKS.
#include "dequant_int4.cuh"
#include "weight_only.cuh"

constexpr int WORDS = PIECE / 32; // of a thread's quarter of a piece

// Strides in elements of what they step through.
struct Work {
    const u16 *x;
    const u32 *weight;
    const ScaleT *scale, *offset; // [N, groups]
    const u16 *bias;            // of x's type, or null
    u16 *out;
    int tokens, rows, runs, x_stride, groups;
    int shift; // pieces that share a scale, as a power of two
};
static_assert(sizeof(Work) == 72, "int4_linear.py packs 72 bytes");

// Where this thread reads: its quarter of the first piece of two weight rows, their scales, and its rows of x.
struct Place {
    const u32 *low, *high;
    const float2 *grid_low, *grid_high;
    const u16 *x[NT]; // null: no such row of x
};

// Two weight rows' part of a piece: a quarter of the columns each.
struct KTile {
    u32 low[WORDS], high[WORDS];
};

__device__ inline void fetch(KTile &piece, const Place &at, int number, bool there) {
    if (there) {
        fetch_words<WORDS>(piece.low, at.low + 4 * WORDS * number);
        fetch_words<WORDS>(piece.high, at.high + 4 * WORDS * number);
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            piece.low[i] = piece.high[i] = 0;
        }
    }
}

// Columns 4 i … 4 i + 3 and those 16 further on, as two words each.
struct Four {
    u32 near[2], far[2];
};

// Of a row of x, the columns that meet words `first` and `first + 1` of a thread's quarter.
__device__ inline void fetch_x(Four (&to)[2], const u16 *from, bool there) {
    const uint4 zero = {0, 0, 0, 0};
    const uint4 *at = reinterpret_cast<const uint4 *>(from);
    const uint4 near = there ? at[0] : zero, far = there ? at[2] : zero;
    to[0] = {{near.x, near.y}, {far.x, far.y}};
    to[1] = {{near.z, near.w}, {far.z, far.w}};
}

__device__ inline void fetch_x(Four (&to)[1], const u16 *from, bool there) {
    const uint2 zero = {0, 0};
    const uint2 *at = reinterpret_cast<const uint2 *>(from);
    const uint2 near = there ? at[0] : zero, far = there ? at[4] : zero;
    to[0] = {{near.x, near.y}, {far.x, far.y}};
}

// total += this piece's part of 16 weight rows times up to 8 NT rows of x.
__device__ inline void add(float (&total)[NT][4], const KTile &piece, const Place &at, int number, bool there, int group) {
    constexpr int AT_ONCE = WORDS > 1 ? 2 : 1; // words that meet 16 bytes of x
    float part[NT][4] = {}, sums[NT][4] = {};
#pragma unroll
    for (int j = 0; j < WORDS / AT_ONCE; ++j) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            Four x[AT_ONCE];
            fetch_x(x, at.x[n] + PIECE * number + 8 * j, there && at.x[n]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const u32 a = piece.low[AT_ONCE * j + i], b = piece.high[AT_ONCE * j + i];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    // columns (0, 2) or (1, 3) of the word's four, near and far
                    const u32 pick = odd ? 0x7632u : 0x5410u;
                    const u32 b0 = __byte_perm(x[i].near[0], x[i].near[1], pick);
                    const u32 b1 = __byte_perm(x[i].far[0], x[i].far[1], pick);
                    multiply(part[n], biased_int4_pair(a, 8 * odd), biased_int4_pair(b, 8 * odd), biased_int4_pair(a, 8 * odd + 4),
                             biased_int4_pair(b, 8 * odd + 4), b0, b1);
                    multiply(sums[n], ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, b0, b1);
                }
            }
        }
    }
    const float2 first = at.grid_low[group], second = at.grid_high[group];
    const float base_low = (OFFSET ? first.y : -MIDDLE * first.x) - RAISED * first.x;
    const float base_high = (OFFSET ? second.y : -MIDDLE * second.x) - RAISED * second.x;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            total[n][c] += first.x * part[n][c] + base_low * sums[n][c];
            total[n][2 + c] += second.x * part[n][2 + c] + base_high * sums[n][c];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int4_linear(const __grid_constant__ Work w) {
    extern __shared__ float2 grids[];
    const ThreadTile me = thread_tile(w.rows);
    Place at = {w.weight + me.low * w.runs * 4 + me.place * WORDS, w.weight + me.high * w.runs * 4 + me.place * WORDS,
                grids + me.mine * (w.groups + 1), grids + (me.mine + 8) * (w.groups + 1)};
    // the first column of this thread's quarter
    const int column = PIECE == 128 ? 32 * me.place : PIECE == 64 ? me.place / 2 * 32 + me.place % 2 * 8 : 4 * me.place;
    input_row_pointers(at.x, w.x + column, w.x_stride, me.quad, w.tokens);
    const int whole = (w.runs - column / 32 + WORDS - 1) / WORDS;
    const int pieces = (w.runs + WORDS - 1) / WORDS;
    float total[NT][4] = {};
    pipelined_k_loop<KTile>(
        me.along_k, pieces, [&](KTile &piece, int number) { fetch(piece, at, number, number < whole); },
        [&] {
            stage_scales(grids, w.scale, OFFSET ? w.offset : nullptr, nullptr, w.rows, w.groups);
            pdl_enter(w.tokens);
        },
        [&](const KTile &piece, int number) { add(total, piece, at, number, number < whole, number >> w.shift); });
    finish(total, nullptr, w.bias, w.out, w.rows, w.tokens);
}
