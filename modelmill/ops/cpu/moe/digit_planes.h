// Dot products of integer weights with rows of 16-bit activations in two planes of 8-bit digits.
//
// Computes: sums[N] = x[K] · dequant(weight[N, K])ᵀ: integer products and sums within 128 columns,
//     float32 sums beyond
// Dtypes: x bfloat16 or float16; int8, int4 or e2m1 codes; float32 accumulators
// Layout: codes in rows, 32 columns a run
// Range: K a multiple of 32; AVX-512 with VNNI
// Technique: AVX-512 VNNI (vpdpbusd), 8 weight rows at a time or 1, software prefetch
// Used by: expert_rows.h
//
// 128 columns of x share a power of two, by which they become 16-bit integers: exactly if their
// magnitudes lie within 2^7 (bfloat16) or 2^4 (float16) of the largest, else within 2^-15 of it.
// Such an integer is 256 · high + low, high a signed and low an unsigned byte, since vpdpbusd
// multiplies unsigned by signed bytes: 64 weights in two instructions, where floats take a dozen.
#pragma once
#include "weight_only_gemm/groupwise.h"

#if defined(MILL_AVX512) && defined(__AVX512VNNI__)
#    define MILL_DIGIT_PLANES 1

namespace mill {

using vi = __m512i;

// Of 128 columns: their high digits, their low ones, and what the high sums start with.
struct DigitBlock {
    vi high[2], low[2], start;
};

// How 128 columns of codes become two vectors of bytes. slot(piece): where the 16 columns from
// 16 · piece lie in them; kExcess: by how much unsigned bytes exceed the codes.
template <class Code> struct DigitCodes;

template <> struct DigitCodes<Int8Codes> {
    static constexpr int kExcess = 128;
    static constexpr float kUnit = 1.0f;
    static constexpr int64_t kBytes = 128;
    static int slot(int piece) { return piece * 16; }
    static void load(const uint8_t* p, int64_t count, vi* codes) {
        for (int64_t i = 0; i < 2; i++) {
            const int64_t rest = count - i * 64;
            codes[i] = rest >= 64  ? _mm512_loadu_si512(p + i * 64)
                       : rest <= 0 ? _mm512_setzero_si512()
                                   : _mm512_maskz_loadu_epi8(~0ull >> (64 - rest), p + i * 64);
        }
    }
    static vi without_sign(vi code) { return _mm512_xor_si512(code, _mm512_set1_epi8(-128)); }
};

template <> struct DigitCodes<Int4Codes> {
    static constexpr int kExcess = 0;
    static constexpr float kUnit = 1.0f;
    static constexpr int64_t kBytes = 64;
    static int slot(int piece) { return piece % 2 * 64 + piece / 2 * 16; }
    static void load(const uint8_t* p, int64_t count, vi* codes) {
        const vi packed =
            count >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(~0ull >> (64 - count), p);
        const vi mask = _mm512_set1_epi8(15);
        codes[0] = _mm512_and_si512(packed, mask);
        codes[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
    }
    static vi without_sign(vi code) { return code; }
};

// Twice the values of codes, which are integers; the bytes lie as those of Int4Codes.
template <> struct DigitCodes<E2M1Codes> {
    static constexpr int kExcess = DigitCodes<Int8Codes>::kExcess;
    static constexpr float kUnit = 0.5f;
    static constexpr int64_t kBytes = 64;
    static int slot(int piece) { return DigitCodes<Int4Codes>::slot(piece); }
    static void load(const uint8_t* p, int64_t count, vi* codes) {
        DigitCodes<Int4Codes>::load(p, count, codes);
        const vi doubled = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        for (int i = 0; i < 2; i++) codes[i] = _mm512_shuffle_epi8(doubled, codes[i]);
    }
    static vi without_sign(vi code) { return DigitCodes<Int8Codes>::without_sign(code); }
};

// One block of `count` columns at `from`; returns its power of two.
template <class Code, class T>
inline float pack_digits(DigitBlock& out, const T* from, int64_t count) {
    constexpr int kPieces = kBlockColumns / W;
    vf wide[kPieces];
    vf largest = zero();
    bool nan = false;
    for (int i = 0; i < kPieces; i++) {
        const int64_t rest = count - i * W;
        wide[i] = rest >= W  ? load(from + i * W)
                  : rest > 0 ? load_n(from + i * W, static_cast<int>(rest))
                             : zero();
        nan |= _mm512_cmp_ps_mask(wide[i], wide[i], _CMP_UNORD_Q) != 0;
        largest = max(largest, _mm512_abs_ps(wide[i]));
    }
    const float scale =
        nan ? std::numeric_limits<float>::quiet_NaN() : block_scale(reduce_max(largest));
    const vf inverse = set1(scale == scale ? 1.0f / scale : 0.0f);
    auto* high = reinterpret_cast<uint8_t*>(out.high);
    auto* low = reinterpret_cast<uint8_t*>(out.low);
    for (int i = 0; i < kPieces; i++) {
        const vi whole = _mm512_cvtps_epi32(mul(wide[i], inverse));
        const int slot = DigitCodes<Code>::slot(i);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(high + slot),
                         _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(low + slot), _mm512_cvtepi32_epi8(whole));
    }
    vi digits = _mm512_setzero_si512();
    for (const vi& each : out.high) digits = _mm512_dpbusd_epi32(digits, _mm512_set1_epi8(1), each);
    out.start = _mm512_mullo_epi32(digits, _mm512_set1_epi32(-DigitCodes<Code>::kExcess));
    return scale * DigitCodes<Code>::kUnit;
}

// A row of x: its blocks with their powers of two, and its sums over groups of columns; those of a
// code without offsets are multiplied by what its zero-point is the negative of.
struct DigitRow {
    const DigitBlock* blocks;
    const float* powers;
    const float* group_sums;
    int64_t count;
};

// What the products of a block of columns are multiplied with: its power of two, and the row's sum
// with the row's only scale; a number of its own; or one for each run of 32 columns.
enum class DigitScales { kRow, kBlock, kRun };

// `count` weight rows of `bytes` bytes. next: the rows that are multiplied next, whose lines are
// prefetched; null: unknown. scales: one a row, or `pitch` a row for its blocks or runs, times
// their powers of two. starts: what a row's sum starts with, spread over W lanes; of rows with one
// scale one number, which is added at the end. Null: 0.
struct DigitWeights {
    const uint8_t* rows;
    int64_t bytes, count;
    const uint8_t* next;
    const float* scales;
    int64_t pitch;
    const float* starts;

    // The row that is prefetched while a row is multiplied row by row: one that follows, or one of
    // the next rows.
    const uint8_t* far_row(int64_t row, int64_t rows_ahead) const {
        const int64_t far = row + rows_ahead;
        if (far < count || !next) return rows + far * bytes;
        return next + (far - count < count ? far - count : row) * bytes;
    }
};

// sums[NB] of a row of x and NB weight rows from n0.
template <class Code, int NB, DigitScales SCALES>
__attribute__((noinline)) void digit_dots(float* sums, const DigitRow& x, const DigitWeights& w,
                                          int64_t n0) {
    using Codes = DigitCodes<Code>;
    constexpr bool kOfRow = SCALES == DigitScales::kRow;
    vf total[NB];
    for (int n = 0; n < NB; n++)
        total[n] = !kOfRow && w.starts ? load(w.starts + (n0 + n) * W) : zero();
    const int64_t bytes = w.bytes, pitch = w.pitch, whole = bytes / Codes::kBytes;
    const DigitBlock* blocks = x.blocks;
    const float* powers = x.powers;
    const uint8_t* rows = w.rows + n0 * bytes;
    const float* scales = w.scales + n0 * w.pitch;
    const vi run_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    // sum and the products of `count` columns of row n from block b on; far: what is prefetched
    const auto add_block = [&](vf sum, int64_t n, int64_t b, int64_t count, const uint8_t* far) {
        for (int64_t line = 0; line < Codes::kBytes; line += 64) prefetch_line<1>(far + line);
        const DigitBlock& digits = blocks[b];
        vi codes[2];
        Codes::load(rows + n * bytes + b * Codes::kBytes, count, codes);
        const vi start = Codes::kExcess ? digits.start : _mm512_setzero_si512();
        vi value = _mm512_dpbusd_epi32(start, Codes::without_sign(codes[0]), digits.high[0]);
        value = _mm512_dpbusd_epi32(value, Codes::without_sign(codes[1]), digits.high[1]);
        value = _mm512_dpbusd_epi32(_mm512_slli_epi32(value, 8), digits.low[0], codes[0]);
        value = _mm512_dpbusd_epi32(value, digits.low[1], codes[1]);
        vf scale;
        if constexpr (kOfRow) scale = set1(powers[b]);
        if constexpr (SCALES == DigitScales::kBlock) scale = set1(scales[n * pitch + b]);
        if constexpr (SCALES == DigitScales::kRun) {
            const float* grid = scales + n * pitch + b * kBlockRuns;
            scale = _mm512_permutexvar_ps(run_of_lane, _mm512_castps128_ps512(_mm_loadu_ps(grid)));
        }
        return fma(_mm512_cvtepi32_ps(value), scale, sum);
    };
    const int64_t rest = bytes - whole * Codes::kBytes;
    if constexpr (kRowByRow) {
        const int64_t rows_ahead = (kRowByRowDistance + bytes - 1) / bytes;
        for (int n = 0; n < NB; n++) {
            const uint8_t* far = w.far_row(n0 + n, rows_ahead);
            vf sum = total[n];
            for (int64_t b = 0; b < whole; b++)
                sum = add_block(sum, n, b, Codes::kBytes, far + b * Codes::kBytes);
            if (whole < x.count) sum = add_block(sum, n, whole, rest, far + whole * Codes::kBytes);
            total[n] = sum;
        }
    } else {
        const int64_t distance =
            kToL2<1> && w.next ? w.next - w.rows : prefetch_distance<1>(NB * bytes);
        const auto add_blocks = [&](int64_t b, int64_t count) {
            for (int n = 0; n < NB; n++)
                // to L2 in the order of memory, whose rows and pages are then opened once
                total[n] = add_block(
                    total[n], n, b, count,
                    rows + distance +
                        (kToL2<1> ? (b * NB + n) * Codes::kBytes : b * Codes::kBytes + n * bytes));
        };
        for (int64_t b = 0; b < whole; b++) add_blocks(b, Codes::kBytes);
        if (whole < x.count) add_blocks(whole, rest);
    }
    sums_of(sums, total, NB);
    for (int n = 0; kOfRow && n < NB; n++) {
        sums[n] *= scales[n];
        if (w.starts) sums[n] += w.starts[n0 + n] * x.group_sums[0];
    }
}

}  // namespace mill
#endif
