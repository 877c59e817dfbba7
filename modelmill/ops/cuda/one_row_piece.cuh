// What one_row.cu makes of x once, and of a piece of the weight: 128 columns of 16 rows.
#pragma once

// Four columns of x, from 4 · lane of a piece on, to the words that their products read; gives their sum.
__device__ inline float stage_four(const Work &w, const Layout &to, int number, int lane) {
    const int column = number * 128 + 4 * lane;
    if (INTEGER) {
        const u32 word = column < w.columns ? static_cast<const u32 *>(w.x)[column / 4] : 0;
        reinterpret_cast<u32 *>(to.x)[column / 4] = word;
        return SUMS ? static_cast<float>(__dp4a(static_cast<int>(word), 0x01010101, 0)) : 0.0f;
    }
    uint2 four = {0, 0};
    if (column < w.columns) four = static_cast<const uint2 *>(w.x)[column / 4];
    // thread p of a quad reads 16 words; a product takes two of them, each of two columns that are 2 apart
    const u32 even = __byte_perm(four.x, four.y, 0x5410), odd = __byte_perm(four.x, four.y, 0x7632);
    u32 *piece = reinterpret_cast<u32 *>(to.x) + number * 64;
    if (BITS == 4) { // columns of thread p: 32 p …; a word's lower halves, and 16 columns further its upper ones
        const int place = lane / 8, far = lane % 8 / 4, word = lane % 4;
        piece[place * 16 + word * 4 + far] = even;
        piece[place * 16 + word * 4 + 2 + far] = odd;
    } else { // columns of thread p: 16 p …, and 64 further
        const int load = lane / 16, place = lane % 16 / 4, word = lane % 4;
        piece[place * 16 + load * 8 + word * 2] = even;
        piece[place * 16 + load * 8 + word * 2 + 1] = odd;
    }
    if (!SUMS) return 0.0f;
    return (value(four.x & 0xFFFF) + value(four.x >> 16)) + (value(four.y & 0xFFFF) + value(four.y >> 16));
}

__device__ inline void stage_x(const Work &w, const Layout &to, int pieces) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int number = threadIdx.x / 32; number < pieces; number += WARPS) {
        float sum = stage_four(w, to, number, lane);
        if (SUMS) {
#pragma unroll
            for (int by = 16 / GROUPS; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
            if (lane % (32 / GROUPS) == 0) to.sums[number * GROUPS + lane / (32 / GROUPS)] = sum;
        }
    }
    if (INTEGER) {
        for (int g = threadIdx.x; g < w.groups; g += MULTIPLIERS) to.steps[g] = w.step[g];
    }
    meet(1, MULTIPLIERS);
}

__device__ inline uint4 words(const unsigned char *at) { return *reinterpret_cast<const uint4 *>(at); }

// Of x, what thread `place` multiplies in a piece; quads without a column of their own have zeros.
template <int COUNT>
__device__ inline void x_words(u32 (&b)[4 * COUNT], const unsigned char *at, int stride, bool mine) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        uint4 got = {0, 0, 0, 0};
        if (mine) got = words(at + i * stride);
        b[4 * i] = got.x, b[4 * i + 1] = got.y, b[4 * i + 2] = got.z, b[4 * i + 3] = got.w;
    }
}

// The parts of a piece of two rows of the weight, 16 or 32 bytes of each, as float32: the low row's in columns
// 2 · place and 2 · place + 1, the high row's.
__device__ inline float4 part_of(const unsigned char *low_at, const unsigned char *high_at, const unsigned char *x,
                                 int number, int place, bool mine) {
    constexpr int LOADS = BITS / 4;
#if INTEGER
    u32 b[8];
    x_words<2>(b, x + number * 128 + (BITS == 4 ? 32 : 16) * place, BITS == 4 ? 16 : 64, mine);
    int d[2][4] = {};
#else
    u32 b[16];
    x_words<4>(b, x + number * 256 + 64 * place, 16, mine);
    float d[2][4] = {}; // two, so that a product need not wait for the one before
#endif
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const uint4 first = words(low_at + 64 * i), second = words(high_at + 64 * i);
        const u32 low[4] = {first.x, first.y, first.z, first.w}, high[4] = {second.x, second.y, second.z, second.w};
#if INTEGER
        if (BITS == 4) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply(d[j % 2], low[j] & LOWER_CODES, high[j] & LOWER_CODES, (low[j] >> 4) & LOWER_CODES,
                         (high[j] >> 4) & LOWER_CODES, b[j], b[j + 4]);
        } else {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                multiply(d[j], low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1], b[4 * i + 2 * j],
                         b[4 * i + 2 * j + 1]);
        }
#else
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (BITS == 4) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    multiply(d[odd], raised_codes(low[j], 8 * odd), raised_codes(high[j], 8 * odd),
                             raised_codes(low[j], 8 * odd + 4), raised_codes(high[j], 8 * odd + 4),
                             b[4 * j + 2 * odd], b[4 * j + 2 * odd + 1]);
            } else {
                multiply(d[j % 2], signed_bytes(low[j]), signed_bytes(high[j]), signed_bytes(low[j] >> 8),
                         signed_bytes(high[j] >> 8), b[8 * i + 2 * j], b[8 * i + 2 * j + 1]);
            }
        }
#endif
    }
    return {static_cast<float>(d[0][0] + d[1][0]), static_cast<float>(d[0][1] + d[1][1]),
            static_cast<float>(d[0][2] + d[1][2]), static_cast<float>(d[0][3] + d[1][3])};
}

// What a part of a row comes to: scale, offset, step. grid: the row's scale in the part's group; offsets lie `apart`.
__device__ inline float scaled(const Grid *grid, int apart, float part, float sum, float step) {
    const float scale = grid_value(grid[0]);
    float offset = 0.0f;
    if (OFFSET) offset = grid_value(grid[apart]);
    if (INTEGER) return step * (OFFSET ? fmaf(scale, part, offset * sum) : scale * part);
    if (BITS == 4) offset = OFFSET ? fmaf(-RAISED, scale, offset) : (-MIDDLE - RAISED) * scale;
    return SUMS ? fmaf(scale, part, offset * sum) : scale * part;
}
