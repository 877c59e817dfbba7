// Products of a few rows with 4-bit weights, at the speed of memory: y[t, n] = sum over groups of
// scale * (x . codes) + offset * (sum of x), for up to 8 * NT rows of x, in 16 bits.
//
// A run of 32 columns lies in 16 bytes: byte j has column j in its low half and column j + 16 in its high half
// (ops/int4_linear.py). The four threads of a quad take the four runs of 128 columns of two weight rows, so that each
// reads 16 bytes at a time and a quad's registers are, without a move between threads, the left operand of
// mma.m16n8k16: which column a slot along K stands for is free, as long as x comes in the same order.
//
// A code c is put under the exponent of 128 (1024 in float16): `(word >> 4 h) & 0x000F000F | magic` makes two numbers
// 128 + c in one or two instructions, and no conversion. What that adds is 128 times the sum of x, which the offsets need
// anyway: one more product, with ones in the place of the weights, gives it in the layout of the sums.
//
// Every warp has DEPTH pieces of 128 columns on their way before x may be read.
//
// Macros: those of narrow_weights.cuh, OFFSET (0: symmetric).
#include "narrow_weights.cuh"

#ifndef DEPTH
#define DEPTH (NT <= 2 ? 4 : 2)
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifdef HALF
constexpr u32 MAGIC = 0x64006400u, ONES = 0x3C003C00u;
constexpr float RAISED = 1024.0f;
#else
constexpr u32 MAGIC = 0x43004300u, ONES = 0x3F803F80u;
constexpr float RAISED = 128.0f;
#endif

// Strides in elements of what they step through; a weight row in runs of 16 bytes.
struct Work {
    const u16 *x;
    const uint4 *weight;
    const Grid *scale, *offset; // [N, groups]
    const u16 *bias;            // of x's type, or null
    u16 *out;
    int tokens, rows, runs, x_stride, groups;
    int shift; // pieces of 128 columns that share a scale, as a power of two
};

// d += a . b, 16 x 16 times 16 x 8.
__device__ inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline u32 codes(u32 word, int half) { return ((word >> (4 * half)) & 0x000F000Fu) | MAGIC; }

// Where this thread reads: two weight rows at its run of the first piece, their scales, and its rows of x.
struct Place {
    const uint4 *low, *high;
    const float2 *grid_low, *grid_high;
    const u16 *x[NT]; // null: no such row of x
};

// Two weight rows' part of a piece: 32 columns each.
struct Piece {
    uint4 low, high;
};

__device__ inline void fetch(Piece &piece, const Place &at, int number, bool there) {
    const uint4 zero = {0, 0, 0, 0};
    piece.low = there ? once(at.low + 4 * number) : zero;
    piece.high = there ? once(at.high + 4 * number) : zero;
}

// total += this piece's part of 16 weight rows times up to 8 NT rows of x.
__device__ inline void add(float (&total)[NT][4], const Piece &piece, const Place &at, int number, bool there,
                           int group) {
    const u32 low[4] = {piece.low.x, piece.low.y, piece.low.z, piece.low.w};
    const u32 high[4] = {piece.high.x, piece.high.y, piece.high.z, piece.high.w};
    float part[NT][4] = {}, sums[NT][4] = {};
    // words 2 j and 2 j + 1 of a run meet columns 8 j … 8 j + 7 and those 16 further on
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            uint4 near = {0, 0, 0, 0}, far = {0, 0, 0, 0};
            if (there && at.x[n]) {
                const uint4 *from = reinterpret_cast<const uint4 *>(at.x[n] + COLUMNS * number) + j;
                near = from[0];
                far = from[2];
            }
            const u32 x[2][4] = {{near.x, near.y, near.z, near.w}, {far.x, far.y, far.z, far.w}};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 a = low[2 * j + i], b = high[2 * j + i];
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    // columns (0, 2) or (1, 3) of the word's four, near and far
                    const u32 pick = odd ? 0x7632u : 0x5410u;
                    const u32 b0 = __byte_perm(x[0][2 * i], x[0][2 * i + 1], pick);
                    const u32 b1 = __byte_perm(x[1][2 * i], x[1][2 * i + 1], pick);
                    multiply(part[n], codes(a, 2 * odd), codes(b, 2 * odd), codes(a, 2 * odd + 1),
                             codes(b, 2 * odd + 1), b0, b1);
                    multiply(sums[n], ONES, ONES, ONES, ONES, b0, b1);
                }
            }
        }
    }
    const float2 first = at.grid_low[group], second = at.grid_high[group];
    const float base_low = (OFFSET ? first.y : -8.0f * first.x) - RAISED * first.x;
    const float base_high = (OFFSET ? second.y : -8.0f * second.x) - RAISED * second.x;
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, place = lane % 4;
    const int along_n = warp % RW, along_k = warp / RW;
    const int mine = along_n * 16 + quad;
    const long long low = row_of(mine, w.rows), high = row_of(mine + 8, w.rows);
    Place at = {w.weight + low * w.runs + place, w.weight + high * w.runs + place, grids + mine * (w.groups + 1),
                grids + (mine + 8) * (w.groups + 1)};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int token = quad + 8 * n;
        at.x[n] = token < w.tokens ? w.x + static_cast<long long>(token) * w.x_stride + 32 * place : nullptr;
    }
    // of the last piece, which may not be whole, some threads have no run
    const int pieces = (w.runs + 3) / 4, whole = (w.runs - place + 3) / 4;
    Piece ahead[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        const int number = along_k + s * KW;
        if (number < pieces) {
            fetch(ahead[s], at, number, number < whole);
        }
    }
    stage_grids(grids, w.scale, OFFSET ? w.offset : nullptr, nullptr, w.rows, w.groups);
    enter(w.tokens);
    float total[NT][4] = {};
    for (int start = along_k; start < pieces; start += DEPTH * KW) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int number = start + s * KW, next = number + DEPTH * KW;
            if (number < pieces) {
                const Piece piece = ahead[s];
                if (next < pieces) {
                    fetch(ahead[s], at, next, next < whole);
                }
                add(total, piece, at, number, number < whole, number >> w.shift);
            }
        }
    }
    finish(total, nullptr, w.bias, w.out, w.rows, w.tokens);
}
