// Fragments of the grouped weight-only GEMM: one K tile of one warp.
//
// Computes: total[16, 8 · LIVE] += dequant(weight[16, K_TILE]) · x[8 · LIVE, K_TILE]ᵀ
// Dtypes: int4 codes with float16 scales and offsets, e2m1 codes with e8m0 scales, or int8, to
//     bfloat16 or float16; float32 accumulators
// Layout: weights in shared memory, rows in two halves SKEW bytes apart; x in registers
// Range: K_TILE 128, 64 or 32 columns (int8: half of it)
// Technique: lop3 magic numbers, mma.sync m16n8k16
// Used by: grouped_gemm_wq.cu, moe_decode_mxfp4.cu
//
// A quad reads a K tile of two rows, a quarter per thread, 4 · WORDS bytes. x is permuted along K
// in the same way, so that the registers are the A fragment of mma.sync (mma.cuh). int4: each K
// tile has one scale in a row; the product of the codes is multiplied by it, and MAGIC and the
// offset by the sums of x. e2m1: sign and value of a code are the top bits of a bfloat16 that is
// 2^126 too small; multiply_tile multiplies it by the scale of its 32 columns, which takes that
// back up to 2^32, the rest CODE_SCALE at the end. All these products are exact. Scales above 2^33
// are infinite there.
//
// Macros: FORMAT (0: int4, 1: e2m1, 2: int8), K (columns), GROUP (columns of a scale), K_TILE,
// WARPS, TOKEN_TILES (of 8 pairs), ROW_TILES (of 16 rows in a stage), OFFSET (0: symmetric), HALF.
#pragma once
#include "common/mma.cuh"
#include "weight_only_gemm/dequant_int4.cuh"

constexpr int INT4 = 0, E2M1 = 1, INT8 = 2;
constexpr bool USES_SUMS = FORMAT == INT4;
constexpr float CODE_SCALE = FORMAT == E2M1 ? 4294967296.0f : 1.0f;
constexpr int ROW_BYTES = FORMAT == INT8 ? K : K / 2;
constexpr int WORDS = FORMAT == INT8 ? K_TILE / 16 : K_TILE / 32;  // of a thread's quarter of a row
constexpr int MMAS = FORMAT == INT8 ? WORDS : 2 * WORDS;           // of a K tile
constexpr int TILES_PER_WARP = K / K_TILE / WARPS;
// Rows of a stage lie in two halves; the second one begins in other banks where all rows would
// begin in the same.
constexpr int HALF_ROWS = 8 * ROW_TILES, SKEW = ROW_BYTES % 128 ? 0 : 16 * WORDS,
              HALF_AT = HALF_ROWS * ROW_BYTES + SKEW;
// of a row's scales
constexpr int SCALE_BYTES = FORMAT == INT4 ? K / GROUP * 2 : FORMAT == E2M1 ? K / 32 : 4;

// One warp's columns of x: B fragments of its K tiles.
struct Fragments {
    u32 b[TILES_PER_WARP][MMAS][TOKEN_TILES][2];

    // rows: of this thread's quad, or null; first_tile: the warp's first K tile.
    __device__ void load(const u16* const (&rows)[TOKEN_TILES], int first_tile, int quad_lane) {
#pragma unroll
        for (int t = 0; t < TILES_PER_WARP; ++t)
#pragma unroll
            for (int n = 0; n < TOKEN_TILES; ++n) {
                const u16* from = rows[n] ? rows[n] + (first_tile + t) * K_TILE : nullptr;
                load_tile(t, n, from, quad_lane);
            }
    }

    // Columns (0, 2) and (1, 3) of four, as a code's word has them.
    __device__ static void split(u32& even, u32& odd, u32 first, u32 second) {
        even = __byte_perm(first, second, 0x5410);
        odd = __byte_perm(first, second, 0x7632);
    }

    __device__ void load_tile(int t, int n, const u16* from, int quad_lane) {
        if (FORMAT == INT8) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const uint2 four = load_four(from, (quad_lane * WORDS + i) * 4);
                split(b[t][i % MMAS][n][0], b[t][i % MMAS][n][1], four.x, four.y);
            }
        } else {
            const int column = WORDS == 4   ? 32 * quad_lane
                               : WORDS == 2 ? quad_lane / 2 * 32 + quad_lane % 2 * 8
                                            : 4 * quad_lane;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const uint2 near = load_four(from, column + 4 * i),
                            far = load_four(from, column + 4 * i + 16);
                const int even = 2 * i % MMAS, odd = (2 * i + 1) % MMAS;
                split(b[t][even][n][0], b[t][odd][n][0], near.x, near.y);
                split(b[t][even][n][1], b[t][odd][n][1], far.x, far.y);
            }
        }
    }

    __device__ static uint2 load_four(const u16* from, int column) {
        const uint2 zero = {0, 0};
        return from ? *reinterpret_cast<const uint2*>(from + column) : zero;
    }

    // Sums of a K tile of this thread's two pairs, 2 quad_lane and the next.
    __device__ float2 sum(int t, int n) const {
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < MMAS; ++i)
            mma(sums, ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, b[t][i][n][0], b[t][i][n][1]);
        return {sums[0], sums[1]};
    }
};

// Two rows of a stage in shared memory.
template <int SCALES, int OFFSETS> struct RowPair {
    const unsigned char* stage;
    int low, high;

    __device__ const unsigned char* weights(int row) const {
        return stage + row * ROW_BYTES + (row < HALF_ROWS ? 0 : SKEW);
    }
    __device__ float half_at(int at, int row, int group) const {
        return half_to_float(
            *reinterpret_cast<const u16*>(stage + at + row * SCALE_BYTES + 2 * group));
    }
    __device__ float scale(int row, int group) const { return half_at(SCALES, row, group); }
    // what a sum of x is multiplied by
    __device__ float base(int row, int group) const {
        const float step = scale(row, group);
        return (OFFSET ? half_at(OFFSETS, row, group) : -INT4_ZERO_POINT * step) - MAGIC * step;
    }
    // e8m0: a pair of 2^(code − 127 + 126 − 32)
    __device__ u32 power_of_two_pair(int row, int run) const {
        return min(stage[SCALES + row * SCALE_BYTES + run] + 94, 255) * 0x00800080u;
    }
};

// A thread's quarter of a row of a K tile.
__device__ __forceinline__ void read_words(u32 (&words)[WORDS], const unsigned char* from) {
    if constexpr (WORDS == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (WORDS == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x, words[1] = two.y;
    } else {
        words[0] = *reinterpret_cast<const u32*>(from);
    }
}

#ifndef HALF
__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The e2m1 codes at bits 4 · HIGH and 4 · HIGH + 16, 2^126 too small. One product copies a nibble
// to where its sign and to where its value belongs.
template <int HIGH> __device__ __forceinline__ u32 small_e2m1_pair(u32 word) {
    const u32 nibbles = word & (HIGH ? 0x00F000F0u : 0x000F000Fu);
    return nibbles * (HIGH ? 0x0104u : 0x1040u) & 0x81C081C0u;
}

// The same times a pair of scales.
template <int HIGH> __device__ __forceinline__ u32 e2m1_pair(u32 word, u32 scales) {
    return multiply_pairs(small_e2m1_pair<HIGH>(word), scales);
}
#endif

// A fragment i of two rows' words.
__device__ __forceinline__ void dequantize(u32 (&a)[4], const u32 (&low)[WORDS],
                                           const u32 (&high)[WORDS], int i, u32 low_scales,
                                           u32 high_scales) {
    if constexpr (FORMAT == INT8) {
        a[0] = dequant_int8_pair(low[i % WORDS]), a[1] = dequant_int8_pair(high[i % WORDS]);
        a[2] = dequant_int8_pair(low[i % WORDS] >> 8);
        a[3] = dequant_int8_pair(high[i % WORDS] >> 8);
    } else if constexpr (FORMAT == INT4) {
        const u32 l = low[i / 2], h = high[i / 2];
        const int shift = i % 2 * 8;
        a[0] = biased_int4_pair(l, shift), a[1] = biased_int4_pair(h, shift);
        a[2] = biased_int4_pair(l, shift + 4), a[3] = biased_int4_pair(h, shift + 4);
    } else {
#ifndef HALF
        const u32 l = low[i / 2] >> i % 2 * 8, h = high[i / 2] >> i % 2 * 8;
        a[0] = e2m1_pair<0>(l, low_scales), a[1] = e2m1_pair<0>(h, high_scales);
        a[2] = e2m1_pair<1>(l, low_scales), a[3] = e2m1_pair<1>(h, high_scales);
#endif
    }
}

// k_tile: of the whole row; x: B fragments of the K tile; sums: of its x.
template <int LIVE, typename Rows>
__device__ __forceinline__ void multiply_tile(float (&total)[LIVE][4], const Rows& rows, int k_tile,
                                              const u32 (&x)[MMAS][TOKEN_TILES][2], int quad_lane,
                                              const float2 (&sums)[TOKEN_TILES][4]) {
    u32 low[WORDS], high[WORDS], low_scales = 0, high_scales = 0;
    const int from = (k_tile * 4 + quad_lane) * (4 * WORDS);
    read_words(low, rows.weights(rows.low) + from);
    read_words(high, rows.weights(rows.high) + from);
    if (FORMAT == E2M1) {
        const int run = k_tile * (K_TILE / 32) + quad_lane * WORDS / 4;
        low_scales = rows.power_of_two_pair(rows.low, run);
        high_scales = rows.power_of_two_pair(rows.high, run);
    }
    float part[LIVE][4] = {};
#pragma unroll
    for (int i = 0; i < MMAS; ++i) {
        u32 a[4];
        dequantize(a, low, high, i, low_scales, high_scales);
#pragma unroll
        for (int n = 0; n < LIVE; ++n)
            mma(USES_SUMS ? part[n] : total[n], a[0], a[1], a[2], a[3], x[i][n][0], x[i][n][1]);
    }
    if (USES_SUMS) {
        const int group = k_tile * K_TILE / GROUP;
        const float low_scale = rows.scale(rows.low, group),
                    high_scale = rows.scale(rows.high, group),
                    low_base = rows.base(rows.low, group), high_base = rows.base(rows.high, group);
#pragma unroll
        for (int n = 0; n < LIVE; ++n) {
            const float2 sum = sums[n][quad_lane];
            total[n][0] += low_scale * part[n][0] + low_base * sum.x;
            total[n][1] += low_scale * part[n][1] + low_base * sum.y;
            total[n][2] += high_scale * part[n][2] + high_base * sum.x;
            total[n][3] += high_scale * part[n][3] + high_base * sum.y;
        }
    }
}
