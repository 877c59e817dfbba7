// GEMM of integer weights by 16-bit activations in block floating point.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ: integer products and sums within 128
//     columns, float32 sums beyond
// Dtypes: x bfloat16 or float16; int8, int4 or e2m1 codes; float32 accumulators
// Layout: codes in rows, 32 columns a run
// Range: any M; AVX2 without AVX-512
// Technique: AVX2 multiply-add of 16-bit integers (vpmaddwd), register blocking, rows far
//     apart in flight (weight_stream.h); from five rows of x on a tile of unpacked weights in the
//     cache
// Used by: groupwise.h
//
// 128 columns of a row of x share a power of two, by which they become 16-bit integers: exactly if
// their magnitudes lie within 2^7 (bfloat16) or 2^4 (float16) of the largest, else within 2^-15 of
// it. Codes become 16-bit integers too, so that one instruction multiplies 16 columns, where a
// float FMA multiplies 8 after two conversions. Integer sums are exact, and the float sums of a row
// are taken in the same order whatever the blocking: a row gives the same bits alone and in a
// batch.
#pragma once
#include <cmath>
#include <limits>

#include "common/parallel_for.h"
#include "common/weight_stream.h"
#include "common/simd.h"

namespace mill {

constexpr int64_t kRunColumns = 32;
constexpr int64_t kBlockRuns = 4;  // that share a power of two
constexpr int64_t kBlockColumns = kBlockRuns * kRunColumns;
constexpr int64_t kMaxPackedRows = 4;  // of x, up to which codes are unpacked for each pair of rows

// 2^s for the largest magnitude of a block, so that mantissas have 16 bits, but at least the
// smallest normal float; NaN if the magnitude is not finite.
inline float block_scale(float largest) {
    if (!(largest < std::numeric_limits<float>::infinity()))
        return std::numeric_limits<float>::quiet_NaN();
    const int exponent = static_cast<int>(bits_of(largest) >> 23) - 127 - 14;
    return float_of(static_cast<uint32_t>((exponent < -126 ? -126 : exponent) + 127) << 23);
}

#if defined(MILL_AVX2)
// Whether activations of type T are multiplied as 16-bit integers.
template <class T> constexpr bool kBlockFloatingPoint = sizeof(T) == 2;

using vw = __m256i;  // 16 words or 8 integers

// Rows of x in block floating point: mantissas [rows, stride], powers of two [rows, blocks], and
// the sums of x over `group` columns [rows, group_stride] where they are needed.
struct FixedPointRows {
    const int16_t* mantissas;
    const float* scales;
    const float* group_sums;
    int64_t stride, blocks, group_stride;
};

// Columns of a scale and offset, padded to whole vectors.
inline int64_t padded_groups(int64_t groups) { return (groups + W - 1) / W * W; }

// One block of `count` columns at `from`; returns its power of two.
template <class T> inline float pack_block(int16_t* out, const T* from, int64_t count) {
    alignas(32) float wide[kBlockColumns];
    vf largest = zero();
    const vf sign = set1(-0.0f);
    bool nan = false;
    for (int64_t i = 0; i < kBlockColumns; i += W) {
        const int64_t rest = count - i;
        const vf values = rest >= W  ? load(from + i)
                          : rest > 0 ? load_n(from + i, static_cast<int>(rest))
                                     : zero();
        store(wide + i, values);
        nan |= _mm256_movemask_ps(_mm256_cmp_ps(values, values, _CMP_UNORD_Q)) != 0;
        largest = max(largest, _mm256_andnot_ps(sign, values));
    }
    const float scale =
        nan ? std::numeric_limits<float>::quiet_NaN() : block_scale(reduce_max(largest));
    const vf inverse = set1(scale == scale ? 1.0f / scale : 0.0f);
    for (int64_t i = 0; i < kBlockColumns; i += 2 * W) {
        const vw low = _mm256_cvtps_epi32(mul(load(wide + i), inverse)),
                 high = _mm256_cvtps_epi32(mul(load(wide + i + W), inverse));
        const vw words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<vw*>(out + i), words);
    }
    return scale;
}

inline int32_t sum_words(const int16_t* words) {  // of one run
    const vw ones = _mm256_set1_epi16(1);
    const auto* p = reinterpret_cast<const vw*>(words);
    const vw pairs = _mm256_add_epi32(_mm256_madd_epi16(_mm256_loadu_si256(p), ones),
                                      _mm256_madd_epi16(_mm256_loadu_si256(p + 1), ones));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

// x[rows, k] in block floating point. group_runs: runs of a group whose sums are needed, or 0;
// unit: by which the scales are multiplied, a power of two.
template <class T>
inline FixedPointRows pack_rows(Scratch& scratch, const T* x, int64_t rows, int64_t k,
                                int64_t group_runs, float unit = 1.0f) {
    const int64_t blocks = (k + kBlockColumns - 1) / kBlockColumns, stride = blocks * kBlockColumns,
                  runs = (k + kRunColumns - 1) / kRunColumns,
                  groups = group_runs ? (runs + group_runs - 1) / group_runs : 0,
                  group_stride = padded_groups(groups);
    int16_t* mantissas = scratch.get<int16_t>(rows * (stride + 2 * (blocks + group_stride)));
    float* scales = reinterpret_cast<float*>(mantissas + rows * stride);
    float* group_sums = scales + rows * blocks;
    const auto pack_row = [&](int64_t m) {
        int16_t* row = mantissas + m * stride;
        for (int64_t b = 0; b < blocks; b++)
            scales[m * blocks + b] = pack_block(
                row + b * kBlockColumns, x + m * k + b * kBlockColumns, k - b * kBlockColumns);
        float* sums = group_sums + m * group_stride;
        for (int64_t g = 0; g < group_stride; g++) sums[g] = 0.0f;
        for (int64_t run = 0; group_runs && run < runs; run++)
            sums[run / group_runs] += scales[m * blocks + run / kBlockRuns] *
                                      static_cast<float>(sum_words(row + run * kRunColumns));
        for (int64_t b = 0; b < blocks; b++) scales[m * blocks + b] *= unit;
    };
    parallel_for_rows(rows, k * 8, [&](int64_t from, int64_t to) {
        for (int64_t m = from; m < to; m++) pack_row(m);
    });
    return {mantissas, scales, group_sums, stride, blocks, group_stride};
}

// Unpacked weights: NB rows of 16-bit integers, filled up with zeros to whole blocks.
struct WordTile {
    static constexpr bool kPacked = false;
    const int16_t* words;
    int64_t stride;
    vw half_run(int n, int64_t r, int half) const {
        return _mm256_loadu_si256(
            reinterpret_cast<const vw*>(words + n * stride + r * kRunColumns) + half);
    }
};

// Packed weights: rows of `bytes` bytes, `pitch` bytes apart. Reads beyond a row's last byte never
// happen.
template <class Code> struct CodeRows {
    static constexpr bool kPacked = true;
    const uint8_t* codes;
    int64_t bytes, pitch;
    void run(int n, int64_t r, vw& low, vw& high) const {
        Code::words(codes + n * pitch + r * Code::kBytes, low, high);
    }
    void last_run(int n, int64_t r, vw& low, vw& high) const {
        const int64_t rest = bytes - r * Code::kBytes;
        if (rest >= Code::kBytes) return run(n, r, low, high);
        alignas(32) uint8_t filled[Code::kBytes] = {};
        std::memcpy(filled, codes + n * pitch + r * Code::kBytes, static_cast<size_t>(rest));
        Code::words(filled, low, high);
    }
    // Row n as words, filled up with zeros to `stride`.
    void unpack(int n, int64_t runs, int16_t* out, int64_t stride) const {
        for (int64_t r = 0; r < runs; r++) {
            vw low, high;
            last_run(n, r, low, high);
            auto* p = reinterpret_cast<vw*>(out + r * kRunColumns);
            _mm256_storeu_si256(p, low);
            _mm256_storeu_si256(p + 1, high);
        }
        std::memset(out + runs * kRunColumns, 0,
                    static_cast<size_t>(stride - runs * kRunColumns) * sizeof(int16_t));
    }
};

// Keeps a value in a register: the compiler would repeat its load at every use, or regroup sums so
// that they do not fit.
inline vw in_register(vw v) {
    asm("" : "+x"(v));
    return v;
}

// Lanes whose sum is the dot product of `count` numbers; b is zero beyond them, up to whole
// vectors.
inline vf dot_of_groups(const float* a, const float* b, int64_t count) {
    vf total = zero();
    int64_t i = 0;
    for (; i + W <= count; i += W) total = fma(load(a + i), load(b + i), total);
    if (i < count) total = fma(load_n(a + i, static_cast<int>(count - i)), load(b + i), total);
    return total;
}

// Weights as the kernel multiplies them: scales and offsets [N, groups] in float, or null where a
// row has one scale, which store_out applies.
struct WeightGrids {
    const float* scales;
    const float* offsets;
    int64_t groups, group_runs;
    int64_t pitch;  // from a row's to the next row's
    // Of the rows from n on, `pitch` rows apart.
    WeightGrids rows(int64_t n, int64_t row_pitch) const {
        return {scales ? scales + n * groups : nullptr, offsets ? offsets + n * groups : nullptr,
                groups, group_runs, row_pitch * groups};
    }
};

// sums[MB][NB] of MB rows of x and NB rows of weights. RUNS: runs whose
// integers are summed before a scale is applied; SCALED: whether there are scales of groups.
template <int MB, int NB, int RUNS, bool SCALED, class Weights>
__attribute__((noinline)) void fixed_point_block(float* sums, const FixedPointRows& x, int64_t m0,
                                                 const Weights& w, int64_t runs,
                                                 int64_t whole_blocks, const WeightGrids& grids) {
    const int16_t* rows = x.mantissas + m0 * x.stride;
    const float* powers = x.scales + m0 * x.blocks;
    vf total[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) total[m][n] = zero();
    vf part[MB][NB];
    // `count` runs from `first`, the s-th segment of a block; whole: none is cut by the row's end
    const auto segment = [&](int s, int64_t first, int64_t count, auto whole) {
        vw sum[MB][NB];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) sum[m][n] = _mm256_setzero_si256();
        for (int64_t r = first; r < first + count; r++) {
            const auto* at = reinterpret_cast<const vw*>(rows + r * kRunColumns);
            if constexpr (Weights::kPacked) {
                vw xs[MB][2];
                for (int m = 0; m < MB; m++)
                    for (int half = 0; half < 2; half++)
                        xs[m][half] = _mm256_loadu_si256(at + m * (x.stride / 16) + half);
                for (int n = 0; n < NB; n++) {
                    vw words[2];
                    if constexpr (decltype(whole)::value)
                        w.run(n, r, words[0], words[1]);
                    else
                        w.last_run(n, r, words[0], words[1]);
                    for (int m = 0; m < MB; m++)
                        for (int half = 0; half < 2; half++)
                            sum[m][n] = in_register(_mm256_add_epi32(
                                sum[m][n], _mm256_madd_epi16(words[half], xs[m][half])));
                }
            } else {
                // half a run at a time, so that everything stays in registers
                for (int half = 0; half < 2; half++) {
                    vw words[NB];
                    for (int n = 0; n < NB; n++) words[n] = in_register(w.half_run(n, r, half));
                    for (int m = 0; m < MB; m++) {
                        const vw xs =
                            in_register(_mm256_loadu_si256(at + m * (x.stride / 16) + half));
                        for (int n = 0; n < NB; n++)
                            sum[m][n] = in_register(
                                _mm256_add_epi32(sum[m][n], _mm256_madd_epi16(words[n], xs)));
                    }
                }
            }
        }
        for (int n = 0; n < NB; n++) {
            vf scale = zero();
            if constexpr (SCALED)
                scale = set1(grids.scales[n * grids.pitch + first / grids.group_runs]);
            for (int m = 0; m < MB; m++) {
                const vf value = _mm256_cvtepi32_ps(sum[m][n]);
                if constexpr (!SCALED)
                    part[m][n] = value;
                else
                    part[m][n] = s ? fma(value, scale, part[m][n]) : mul(value, scale);
            }
        }
    };
    for (int64_t b = 0; b < x.blocks; b++) {
        const int64_t first = b * kBlockRuns;
        if (b < whole_blocks) {
            for (int s = 0; s < kBlockRuns / RUNS; s++)
                segment(s, first + s * RUNS, RUNS, std::true_type{});
        } else {
            for (int m = 0; m < MB; m++)
                for (int n = 0; n < NB; n++) part[m][n] = zero();
            for (int s = 0; s < kBlockRuns / RUNS && first + s * RUNS < runs; s++) {
                const int64_t from = first + s * RUNS,
                              count = from + RUNS < runs ? RUNS : runs - from;
                segment(s, from, count, std::false_type{});
            }
        }
        for (int m = 0; m < MB; m++) {
            const vf power = set1(powers[m * x.blocks + b]);
            for (int n = 0; n < NB; n++) total[m][n] = fma(part[m][n], power, total[m][n]);
        }
    }
    if (grids.offsets) {
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++)
                total[m][n] =
                    add(total[m][n],
                        dot_of_groups(grids.offsets + n * grids.pitch,
                                      x.group_sums + (m0 + m) * x.group_stride, grids.groups));
    }
    sums_of(sums, &total[0][0], MB * NB);
}

// sums[last − m, stride] of NB rows of weights, `pitch` rows apart, and x's rows [m, last); a row's
// sums are `pitch` apart, too.
template <int NB, int RUNS, bool SCALED, class Code>
inline void fixed_point_rows(float* sums, int64_t stride, int64_t pitch, const FixedPointRows& x,
                             int64_t m, int64_t last, const CodeRows<Code>& w, int64_t runs,
                             const WeightGrids& grids) {
    const int64_t whole_blocks = w.bytes / (kBlockRuns * Code::kBytes);
    const auto each_pair = [&](const auto& weights) {
        using Weights = std::decay_t<decltype(weights)>;
        float block[2 * NB];
        const auto put_sums = [&](int count) {
            for (int i = 0; i < count; i++, sums += stride)
                for (int n = 0; n < NB; n++) sums[n * pitch] = block[i * NB + n];
        };
        if constexpr (NB <= 4)
            for (; m + 2 <= last; m += 2) {
                fixed_point_block<2, NB, RUNS, SCALED, Weights>(block, x, m, weights, runs,
                                                                whole_blocks, grids);
                put_sums(2);
            }
        if (m == last) return;
        fixed_point_block<1, NB, RUNS, SCALED, Weights>(block, x, m, weights, runs, whole_blocks,
                                                        grids);
        put_sums(1);
    };
    if (last - m <= kMaxPackedRows) return each_pair(w);
    thread_local Scratch scratch;
    int16_t* words = scratch.get<int16_t>(NB * x.stride);
    for (int n = 0; n < NB; n++) w.unpack(n, runs, words + n * x.stride, x.stride);
    each_pair(WordTile{words, x.stride});
}

// sums[last − m, to − from] of x's rows [m, last) and weight rows [from, to), whose scales and
// offsets `grids` are, on this thread.
template <int RUNS, bool SCALED, class Code>
inline void fixed_point_columns(float* sums, const FixedPointRows& x, int64_t m, int64_t last,
                                const uint8_t* codes, int64_t bytes, int64_t runs, int64_t from,
                                int64_t to, const WeightGrids& grids) {
    const int64_t columns = to - from;
    const auto multiply_rows = [&](int64_t j, int64_t pitch, auto count) {
        const CodeRows<Code> w{codes + (from + j) * bytes, bytes, pitch * bytes};
        fixed_point_rows<decltype(count)::value, RUNS, SCALED>(sums + j, columns, pitch, x, m, last,
                                                               w, runs, grids.rows(j, pitch));
    };
    if (last - m == 1)
        for_far_rows<8>(columns, multiply_rows);
    else
        for_far_rows<4>(columns, multiply_rows);
}

// The GEMM over all threads. grids_of(row, count): the scales and offsets of `count` rows of
// weights; store_out(m, n, sums, count).
template <int RUNS, bool SCALED, class Code, class GridsOf, class StoreOut>
inline void fixed_point_gemm(const FixedPointRows& x, int64_t rows, const uint8_t* codes,
                             int64_t bytes, int64_t runs, int64_t n, const GridsOf& grids_of,
                             const StoreOut& store_out) {
    constexpr int64_t kRowsInL2 = 128 << 10;  // bytes of x
    const int64_t block = (kRowsInL2 / (x.stride * 2 + 1) / 12 + 1) * 12,
                  blocks = (rows + block - 1) / block;
    const int64_t step = far_chunk_rows(n, bytes, blocks);
    // weight rows [from, to) for x's rows [m, last)
    const auto chunk = [&](int64_t m, int64_t last, int64_t from, int64_t to) {
        thread_local Scratch scratch;
        const int64_t columns = to - from;
        float* sums = scratch.get<float>((last - m) * columns);
        fixed_point_columns<RUNS, SCALED, Code>(sums, x, m, last, codes, bytes, runs, from, to,
                                                grids_of(from, columns));
        for (int64_t i = m; i < last; i++)
            store_out(i, from, sums + (i - m) * columns, static_cast<int>(columns));
    };
    parallel_for_tiles(rows, block, n, step, n * bytes * (rows + 3) / 4, chunk);
}
#else
template <class T> constexpr bool kBlockFloatingPoint = false;
#endif

}  // namespace mill
