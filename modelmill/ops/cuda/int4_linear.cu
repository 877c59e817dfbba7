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
// A block has 8 warps: RW of them take 16 weight rows each, the other factor splits K. Every warp has DEPTH pieces of
// 128 columns on their way before x may be read.
//
// Macros: NT (tiles of 8 rows of x), RW (warps along N), HALF (float16 for bfloat16), OFFSET (0: symmetric).
#include "hopper.cuh"

typedef unsigned short u16;

constexpr int WARPS = 8, KW = WARPS / RW, DEPTH = NT <= 2 ? 4 : 2, COLUMNS = 128;
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
    const u16 *scale, *offset; // float16 [N, groups]
    const u16 *bias;           // of x's type, or null
    u16 *out;
    int tokens, rows, runs, x_stride, groups, out_stride;
    int shift; // pieces of 128 columns that share a scale, as a power of two
};

__device__ inline float widened(u16 half_bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half_bits));
    return wide;
}

__device__ inline float value(u16 bits) {
#ifdef HALF
    return widened(bits);
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

__device__ inline u16 rounded(float wide) {
    u16 bits;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(wide));
    return bits;
}

// d += a . b, 16 x 16 times 16 x 8.
__device__ inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Weights are used once in a step: they should not push x out of the nearest cache.
__device__ inline uint4 once(const uint4 *from) {
    uint4 got;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(from));
    return got;
}

__device__ inline u32 codes(u32 word, int half) { return ((word >> (4 * half)) & 0x000F000Fu) | MAGIC; }

// Where this thread reads: two weight rows at its run of the first piece, their grids, and its rows of x.
struct Place {
    const uint4 *low, *high;
    const u16 *scale_low, *scale_high, *offset_low, *offset_high;
    const u16 *x[NT]; // null: no such row of x
};

// Two weight rows' part of a piece: 32 columns each, and what turns codes into weights.
struct Piece {
    uint4 low, high;
    u16 scale_low, scale_high, offset_low, offset_high;
};

__device__ inline void fetch(Piece &piece, const Place &at, int number, bool there, int shift) {
    const uint4 zero = {0, 0, 0, 0};
    piece.low = there ? once(at.low + 4 * number) : zero;
    piece.high = there ? once(at.high + 4 * number) : zero;
    const int group = number >> shift;
    piece.scale_low = at.scale_low[group];
    piece.scale_high = at.scale_high[group];
    if (OFFSET) {
        piece.offset_low = at.offset_low[group];
        piece.offset_high = at.offset_high[group];
    }
}

// total += this piece's part of 16 weight rows times up to 8 NT rows of x.
__device__ inline void add(float (&total)[NT][4], const Piece &piece, const Place &at, int number, bool there) {
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
    const float scale_low = widened(piece.scale_low), scale_high = widened(piece.scale_high);
    const float base_low = (OFFSET ? widened(piece.offset_low) : -8.0f * scale_low) - RAISED * scale_low;
    const float base_high = (OFFSET ? widened(piece.offset_high) : -8.0f * scale_high) - RAISED * scale_high;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            total[n][c] += scale_low * part[n][c] + base_low * sums[n][c];
            total[n][2 + c] += scale_high * part[n][2 + c] + base_high * sums[n][c];
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) int4_linear(const __grid_constant__ Work w) {
    __shared__ float kept[WARPS][NT * 4][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, place = lane % 4;
    const int along_n = warp % RW, along_k = warp / RW;
    const int first = (blockIdx.x * RW + along_n) * 16 + quad;
    // rows past the end repeat the last one: their results are not stored
    const long long low = min(first, w.rows - 1), high = min(first + 8, w.rows - 1);
    Place at = {w.weight + low * w.runs + place, w.weight + high * w.runs + place,
                w.scale + low * w.groups,        w.scale + high * w.groups,
                w.offset + low * w.groups,       w.offset + high * w.groups};
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
            fetch(ahead[s], at, number, number < whole, w.shift);
        }
    }
    // With one row of x a step is many small blocks, which may fill whatever is free; with more rows they would crowd.
    if (NT == 1 && w.tokens == 1) {
        asm volatile("griddepcontrol.launch_dependents;");
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (w.tokens > 1) {
        asm volatile("griddepcontrol.launch_dependents;");
    }
    float total[NT][4] = {};
    for (int start = along_k; start < pieces; start += DEPTH * KW) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int number = start + s * KW, next = number + DEPTH * KW;
            if (number < pieces) {
                const Piece piece = ahead[s];
                if (next < pieces) {
                    fetch(ahead[s], at, next, next < whole, w.shift);
                }
                add(total, piece, at, number, number < whole);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < NT * 4; ++i) {
        kept[warp][i][lane] = total[i / 4][i % 4];
    }
    __syncthreads();
    // each warp along N and each of its sums once; several warps share the work
    for (int at = threadIdx.x; at < RW * NT * 4 * 32; at += WARPS * 32) {
        const int l = at % 32, i = at / 32 % (NT * 4), r = at / (32 * NT * 4);
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < KW; ++k) {
            sum += kept[k * RW + r][i][l];
        }
        const int row = (blockIdx.x * RW + r) * 16 + l / 4 + (i % 4 >= 2 ? 8 : 0);
        const int token = i / 4 * 8 + l % 4 * 2 + i % 2;
        if (row < w.rows && token < w.tokens) {
            if (w.bias) {
                sum += value(w.bias[row]);
            }
            w.out[static_cast<long long>(token) * w.out_stride + row] = rounded(sum);
        }
    }
}
