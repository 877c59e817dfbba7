// Groupwise weight-only GEMM.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ + bias, a scale and offset per row and
//     group of columns
// Dtypes: x and out float32, bfloat16 or float16; int4, e2m1 or int8 codes; float16, float32 or
//     e8m0 scales; float32 accumulators
// Layout: codes as in ops/int4_linear.py and ops/int8_group_linear.py; scales and offsets [N,
//     groups]
// Range: any M
// Technique: AVX-512 table lookup (permutexvar) or AVX2 shifts for nibbles, FMA, software prefetch
// Used by: digit_planes.h, expert_rows.h, int4_linear.cpp, int8_group_linear.cpp, int8_linear.cpp,
//     mxfp4_linear.cpp
//
// Codes become floats in registers; scales are applied once per group, and offsets multiply the
// group sums of x. Many rows of bfloat16 meet weights rounded to bfloat16 where AVX512_BF16 is
// fast.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "gemm_16bit/gemm_large_m.h"
#include "weight_only_gemm/block_floating_point.h"

namespace mill {

constexpr int64_t kPackColumns = kRunColumns;

// How scales are stored.
enum ScaleType { kFloatScale = 0, kHalfScale = 1, kE8M0Scale = 2 };

// 2^(code − 127); 255 is NaN.
inline float e8m0(uint8_t code) {
    if (code == 255) return std::numeric_limits<float>::quiet_NaN();
    return float_of(code ? static_cast<uint32_t>(code) << 23 : 0x00400000u);
}

// W bytes to the floats of their low and high nibbles.
#if defined(MILL_AVX512)
inline void look_up_nibbles(const uint8_t* p, vf table, vf& low, vf& high) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    low = _mm512_permutexvar_ps(wide, table);  // reads the lowest four bits of each index alone
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table);
}
inline void unpack_nibbles(const uint8_t* p, vf& low, vf& high) {
    look_up_nibbles(p, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), low,
                    high);
}
inline void unpack_e2m1(const uint8_t* p, vf& low, vf& high) {
    look_up_nibbles(p,
                    _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                   -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f),
                    low, high);
}
#elif defined(MILL_AVX2)
inline void unpack_nibbles(const uint8_t* p, vf& low, vf& high) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    low = _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
    high = _mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
}
// Twice the values of codes, which are integers.
inline __m128i doubled_e2m1(__m128i codes) {
    return _mm_shuffle_epi8(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
                            codes);
}
inline void unpack_e2m1(const uint8_t* p, vf& low, vf& high) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i mask = _mm_set1_epi8(15);
    const vf half = set1(0.5f);
    const auto values = [&](__m128i codes) {
        const __m128i doubled = doubled_e2m1(_mm_and_si128(codes, mask));
        return mul(half, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(doubled)));
    };
    low = values(bytes);
    high = values(_mm_srli_epi16(bytes, 4));
}
#else
inline void unpack_nibbles(const uint8_t* p, vf& low, vf& high) {
    for (int i = 0; i < W; i++) {
        low.lane[i] = static_cast<float>(p[i] & 15);
        high.lane[i] = static_cast<float>(p[i] >> 4);
    }
}
inline void unpack_e2m1(const uint8_t* p, vf& low, vf& high) {
    static const float values[] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                   -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    for (int i = 0; i < W; i++) {
        low.lane[i] = values[p[i] & 15];
        high.lane[i] = values[p[i] >> 4];
    }
}
#endif

// 32 columns of a row in 16 bytes: the low nibbles are the first 16.
template <void (*unpack)(const uint8_t*, vf&, vf&)> struct NibbleCodes {
    static constexpr int64_t kBytes = 16;
    static void pair(const uint8_t* run, int b, vf& low, vf& high) { unpack(run + b, low, high); }
};

// Integers; symmetric codes have zero-point 8.
struct Int4Codes : NibbleCodes<unpack_nibbles> {
    static constexpr float kZeroPoint = 8.0f;
#if defined(MILL_AVX2)
    static constexpr float kUnit = 1.0f;  // that a word of 1 stands for
    static void words(const uint8_t* run, vw& low, vw& high) {
        const vw wide =
            _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(run)));
        low = _mm256_and_si256(wide, _mm256_set1_epi16(15));
        high = _mm256_srli_epi16(wide, 4);
    }
#endif
};

// 4-bit floats (E2M1).
struct E2M1Codes : NibbleCodes<unpack_e2m1> {
    static constexpr float kZeroPoint = 0.0f;
#if defined(MILL_AVX2)
    static constexpr float kUnit = 0.5f;
    static void words(const uint8_t* run, vw& low, vw& high) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(run));
        const __m128i mask = _mm_set1_epi8(15);
        low = _mm256_cvtepi8_epi16(doubled_e2m1(_mm_and_si128(bytes, mask)));
        high = _mm256_cvtepi8_epi16(doubled_e2m1(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask)));
    }
#endif
};

// 32 columns in 32 bytes, signed.
struct Int8Codes {
    static constexpr int64_t kBytes = 32;
    static constexpr float kZeroPoint = 0.0f;
    static void pair(const uint8_t* run, int b, vf& low, vf& high) {
        low = load(reinterpret_cast<const int8_t*>(run) + b);
        high = load(reinterpret_cast<const int8_t*>(run) + 16 + b);
    }
#if defined(MILL_AVX2)
    static constexpr float kUnit = 1.0f;
    static void words(const uint8_t* run, vw& low, vw& high) {
        const auto* p = reinterpret_cast<const __m128i*>(run);
        low = _mm256_cvtepi8_epi16(_mm_loadu_si128(p));
        high = _mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1));
    }
#endif
};

// A weight [n, k]: rows of `bytes` bytes, `groups` scales and offsets a row, of one ScaleType;
// offset may be null.
template <class Code> struct Grouped {
    const uint8_t* codes;
    const void* scale;
    const void* offset;
    int scale_type;
    int64_t bytes, groups, runs;  // runs: of 32 columns, in a group

    // `count` rows' scales, then their offsets, in float.
    float* grids(int64_t row, int64_t count, Scratch& scratch) const {
        float* out = scratch.get<float>(2 * count * groups);
        const int64_t from = row * groups, total = count * groups;
        copy(out, scale, from, total);
        if (offset)
            copy(out + total, offset, from, total);
        else
            for_each_vector(total, [&](int64_t i, int c) {
                put(out + total + i, mul(set1(-Code::kZeroPoint), take(out + i, c)), c);
            });
        return out;
    }
#if defined(MILL_AVX512)
    // Scales or offsets from number `from` on, up to W of them.
    vf values(const void* source, int64_t from, int count) const {
        if (scale_type == kHalfScale) return take(static_cast<const f16*>(source) + from, count);
        if (scale_type == kFloatScale) return take(static_cast<const float*>(source) + from, count);
        float values[W] = {};
        copy(values, source, from, count);
        return load(values);
    }
#endif
    void copy(float* out, const void* source, int64_t from, int64_t count) const {
        if (scale_type == kE8M0Scale)
            for (int64_t i = 0; i < count; i++)
                out[i] = e8m0(static_cast<const uint8_t*>(source)[from + i]);
        else if (scale_type == kHalfScale)
            for_each_vector(count, [&](int64_t i, int c) {
                put(out + i, take(static_cast<const f16*>(source) + from + i, c), c);
            });
        else
            std::memcpy(out, static_cast<const float*>(source) + from,
                        static_cast<size_t>(count) * sizeof(float));
    }
};

// sums[MB][NB] of MB rows of x (stride floats apart) and NB rows of the weight from n0.
template <class Code, int MB, int NB>
__attribute__((noinline)) void group_block(float* sums, const float* x, int64_t stride,
                                           const float* group_sums, const Grouped<Code>& w,
                                           const float* grids, int64_t n0) {
    vf total[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) total[m][n] = zero();
    const uint8_t* rows = w.codes + n0 * w.bytes;
    const int64_t distance = prefetch_distance<MB>(NB * w.bytes), last = w.bytes / Code::kBytes;
    for (int64_t g = 0, run = 0; g < w.groups; g++) {
        const int64_t end = run + w.runs < last ? run + w.runs : last;
        vf acc[MB][NB];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) acc[m][n] = zero();
        for (; run < end; run++) {
            if (run * Code::kBytes % 64 == 0)
                for (int n = 0; n < NB; n++)
                    prefetch_line<MB>(rows + n * w.bytes + run * Code::kBytes + distance);
            for (int b = 0; b < 16; b += W) {
                const float* at = x + run * kPackColumns + b;
                for (int n = 0; n < NB; n++) {
                    vf low, high;
                    Code::pair(rows + n * w.bytes + run * Code::kBytes, b, low, high);
                    for (int m = 0; m < MB; m++) {
                        acc[m][n] = fma(low, load(at + m * stride), acc[m][n]);
                        acc[m][n] = fma(high, load(at + m * stride + 16), acc[m][n]);
                    }
                }
            }
        }
        for (int n = 0; n < NB; n++) {
            const vf s = set1(grids[n * w.groups + g]);
            for (int m = 0; m < MB; m++) total[m][n] = fma(s, acc[m][n], total[m][n]);
        }
    }
    sums_of(sums, &total[0][0], MB * NB);
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) {
            float offset_sum = 0;
            const float* offset = grids + (NB + n) * w.groups;
            for (int64_t g = 0; g < w.groups; g++)
                offset_sum = std::fma(offset[g], group_sums[m * w.groups + g], offset_sum);
            sums[m * NB + n] += offset_sum;
        }
}

template <class Code, int MB, int NB, class StoreOut>
inline void group_columns(const float* x, const float* group_sums, int64_t stride,
                          const Grouped<Code>& w, const float* grids, int64_t m0, int64_t n0,
                          const StoreOut& store_out) {
    float sums[MB * NB];
    group_block<Code, MB, NB>(sums, x + m0 * stride, stride, group_sums + m0 * w.groups, w, grids,
                              n0);
    for (int m = 0; m < MB; m++) store_out(m0 + m, n0, sums + m * NB, NB);
}

template <class Code, int NB, class StoreOut>
inline void group_rows(const float* x, const float* group_sums, int64_t stride,
                       const Grouped<Code>& w, int64_t m, int64_t last, int64_t n0,
                       const StoreOut& store_out) {
    thread_local Scratch scratch;
    const float* grids = w.grids(n0, NB, scratch);
    if constexpr (W == 16)
        for (; m + 6 <= last; m += 6)
            group_columns<Code, 6, NB>(x, group_sums, stride, w, grids, m, n0, store_out);
    for (; m + 4 <= last; m += 4)
        group_columns<Code, 4, NB>(x, group_sums, stride, w, grids, m, n0, store_out);
    for (; m + 2 <= last; m += 2)
        group_columns<Code, 2, NB>(x, group_sums, stride, w, grids, m, n0, store_out);
    if (m < last) group_columns<Code, 1, NB>(x, group_sums, stride, w, grids, m, n0, store_out);
}

// 32 columns: out[32] = scale · code + offset.
template <class Code, class T>
inline void dequant_run(T* out, const uint8_t* p, vf s, vf o, int64_t count) {
    float wide[kPackColumns];
    for (int b = 0; b < 16; b += W) {
        vf low, high;
        Code::pair(p, b, low, high);
        store(wide + b, fma(low, s, o));
        store(wide + 16 + b, fma(high, s, o));
    }
    for_each_vector(count, [&](int64_t i, int c) { put(out + i, take(wide + i, c), c); });
}

#if defined(MILL_AVX2)
// As group_linear, of activations in 16 bits.
template <class Code, class T, class StoreOut>
void fixed_point_group_linear(Scratch& scratch, const T* x, const Grouped<Code>& w, int64_t rows,
                              int64_t k, int64_t n, const StoreOut& store_out) {
    const bool has_offsets = w.offset || Code::kZeroPoint != 0.0f;
    const FixedPointRows input =
        pack_rows(scratch, x, rows, k, has_offsets ? w.runs : 0, Code::kUnit);
    const auto grids_of = [&](int64_t row, int64_t count) {
        thread_local Scratch grid_scratch;
        const float* grids = w.grids(row, count, grid_scratch);
        return WeightGrids{grids, has_offsets ? grids + count * w.groups : nullptr, w.groups,
                           w.runs, w.groups};
    };
    const auto multiply_by = [&](auto runs_of_a_scale) {
        fixed_point_gemm<decltype(runs_of_a_scale)::value, true, Code>(
            input, rows, w.codes, w.bytes, w.bytes / Code::kBytes, n, grids_of, store_out);
    };
    if (w.runs % 4 == 0)
        multiply_by(std::integral_constant<int, 4>{});
    else if (w.runs % 2 == 0)
        multiply_by(std::integral_constant<int, 2>{});
    else
        multiply_by(std::integral_constant<int, 1>{});
}
#endif

// x[rows, k] in float, filled up with zeros to whole runs: [rows, stride], and the sums of each
// row over a group's columns [rows, groups].
struct FloatRows {
    const float* input;
    const float* group_sums;
    int64_t stride;
};
template <class Code, class T>
FloatRows widen_rows(Scratch& scratch, const T* x, const Grouped<Code>& w, int64_t rows,
                     int64_t k) {
    const int64_t stride = w.bytes / Code::kBytes * kPackColumns, groups = w.groups,
                  group = w.runs * kPackColumns;
    float* input = scratch.get<float>(rows * (stride + groups));
    float* group_sums = input + rows * stride;
    for (int64_t m = 0; m < rows; m++) {
        float* row = input + m * stride;
        for_each_vector(k, [&](int64_t i, int c) { put(row + i, take(x + m * k + i, c), c); });
        std::memset(row + k, 0, static_cast<size_t>(stride - k) * sizeof(float));
        for (int64_t g = 0; g < groups; g++) {
            const int64_t end = (g + 1) * group < stride ? (g + 1) * group : stride;
            vf total = zero();
            for (int64_t i = g * group; i < end; i += W) total = add(total, load(row + i));
            group_sums[m * groups + g] = sum(total);
        }
    }
    return {input, group_sums, stride};
}

#if defined(MILL_AVX512)
// Of x with a panel: with as many sums of a group beside the sums of a row they fill the registers.
constexpr int kGroupPanelRows = 3;

// Codes of weight rows [from, to) as floats: as pack_panel, two vectors a run.
template <class Code>
inline void pack_codes(vf* panel, const Grouped<Code>& w, int64_t from, int64_t to) {
    const int64_t runs = w.bytes / Code::kBytes;
    for (int64_t first = from; first < to; first += kPanelColumns) {
        for (int j = 0; j < kPanelColumns; j++) {
            const uint8_t* row = w.codes + std::min(first + j, to - 1) * w.bytes;
            vf* out = panel + j;
            for (int64_t r = 0; r < runs; r++, out += 2 * kPanelColumns)
                Code::pair(row + r * Code::kBytes, 0, out[0], out[kPanelColumns]);
        }
        panel += 2 * runs * kPanelColumns;
    }
}

// MB rows of x times a group of a panel, without offsets. scales: of its first row.
template <class Code, int MB>
__attribute__((noinline)) void group_panel_block(float* sums, const float* x, int64_t stride,
                                                 const vf* panel, const Grouped<Code>& w,
                                                 const float* const (&scales)[kPanelColumns]) {
    vf total[MB][kPanelColumns];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < kPanelColumns; n++) total[m][n] = zero();
    const int64_t vectors = 2 * (w.bytes / Code::kBytes);
    for (int64_t g = 0, i = 0; g < w.groups; g++) {
        const int64_t end = std::min(i + 2 * w.runs, vectors);
        vf acc[MB][kPanelColumns];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < kPanelColumns; n++) acc[m][n] = zero();
        for (; i < end; i++) {
            vf xs[MB];
            for (int m = 0; m < MB; m++) xs[m] = load(x + m * stride + i * W);
            for (int n = 0; n < kPanelColumns; n++)
                for (int m = 0; m < MB; m++)
                    acc[m][n] = fma(panel[i * kPanelColumns + n], xs[m], acc[m][n]);
        }
        for (int n = 0; n < kPanelColumns; n++) {
            const vf scale = set1(scales[n][g]);
            for (int m = 0; m < MB; m++) total[m][n] = fma(scale, acc[m][n], total[m][n]);
        }
    }
    for (int m = 0; m < MB; m++) sums_of(sums + m * kMaxPanelColumns, total[m], kPanelColumns);
}

// Adds to the sums of a row of x those of its groups times the offsets [groups][kMaxPanelColumns].
inline void add_offsets(float* sums, const float* group_sums, const float* offsets, int64_t groups,
                        int64_t columns) {
    for (int64_t n = 0; n < columns; n += W) {
        vf total = zero();
        for (int64_t g = 0; g < groups; g++)
            total = fma(load(offsets + g * kMaxPanelColumns + n), set1(group_sums[g]), total);
        store(sums + n, add(load(sums + n), total));
    }
}

// Many rows: codes become floats once for all of them. The arithmetic is that of group_block.
template <class Code, class StoreOut>
void group_panels(const FloatRows& wide, const Grouped<Code>& w, int64_t rows, int64_t n,
                  const StoreOut& store_out) {
    const int64_t row_vectors = 2 * (w.bytes / Code::kBytes);
    for_panels(
        rows, wide.stride * 4, n, row_vectors * static_cast<int64_t>(sizeof(vf)),
        [&](int64_t m, int64_t last, int64_t from, int64_t to) {
            thread_local Scratch scratch, grid_scratch, offset_scratch;
            vf* panel = scratch.get<vf>(panel_vectors(from, to, row_vectors));
            pack_codes(panel, w, from, to);
            const int64_t columns = to - from;
            const float* scales = w.grids(from, columns, grid_scratch);
            float* offsets = offset_scratch.get<float>(w.groups * kMaxPanelColumns);
            for (int64_t g = 0; g < w.groups; g++)
                for (int64_t j = 0; j < kMaxPanelColumns; j++)
                    offsets[g * kMaxPanelColumns + j] =
                        j < columns ? scales[(columns + j) * w.groups + g] : 0.0f;
            float sums[kGroupPanelRows * kMaxPanelColumns];
            const auto pass = [&](auto count) {
                constexpr int MB = decltype(count)::value;
                for (int64_t j = 0; j < columns; j += kPanelColumns) {
                    const float* of_rows[kPanelColumns];
                    for (int i = 0; i < kPanelColumns; i++)
                        of_rows[i] = scales + std::min(j + i, columns - 1) * w.groups;
                    group_panel_block<Code, MB>(sums + j, wide.input + m * wide.stride, wide.stride,
                                                panel + j * row_vectors, w, of_rows);
                }
                for (int i = 0; i < MB; i++, m++) {
                    float* row = sums + i * kMaxPanelColumns;
                    add_offsets(row, wide.group_sums + m * w.groups, offsets, w.groups, columns);
                    store_out(m, from, row, static_cast<int>(columns));
                }
            };
            while (m + kGroupPanelRows <= last)
                pass(std::integral_constant<int, kGroupPanelRows>{});
            if (last - m == 2) pass(std::integral_constant<int, 2>{});
            if (last - m == 1) pass(std::integral_constant<int, 1>{});
        });
}
#endif

// As group_linear, with float products.
template <class Code, class T, class StoreOut>
void float_group_linear(Scratch& scratch, const T* x, const Grouped<Code>& w, int64_t rows,
                        int64_t k, int64_t n, const StoreOut& store_out) {
    const FloatRows wide = widen_rows(scratch, x, w, rows, k);
#if defined(MILL_AVX512)
    if (rows >= kMinPanelRows) return group_panels(wide, w, rows, n, store_out);
#endif
    const float *input = wide.input, *group_sums = wide.group_sums;
    const int64_t stride = wide.stride;
    const int64_t block = (kInputBlock / (stride * 4) / 12 + 1) * 12,
                  blocks = (rows + block - 1) / block;
    int64_t chunk_bytes = rows > 16 ? 128 << 10 : 32 << 10;
    const int64_t max_chunk_bytes = n * w.bytes * blocks / 16;
    if (chunk_bytes > max_chunk_bytes) chunk_bytes = max_chunk_bytes;
    const int64_t step = (chunk_bytes / (w.bytes > 0 ? w.bytes : 1) / 8 + 1) * 8;
    parallel_for_tiles(
        rows, block, n, step, n * w.bytes * (rows + 3) / 4,
        [&](int64_t m, int64_t m1, int64_t j, int64_t to) {
            for (; j + 4 <= to; j += 4)
                group_rows<Code, 4>(input, group_sums, stride, w, m, m1, j, store_out);
            for (; j < to; j++)
                group_rows<Code, 1>(input, group_sums, stride, w, m, m1, j, store_out);
        });
}

// The k weights of a row in T. grids: of w.grids.
template <class Code, class T>
inline void dequant_row(T* out, const Grouped<Code>& w, int64_t row, int64_t k,
                        const float* grids) {
    const uint8_t* codes = w.codes + row * w.bytes;
    for (int64_t r = 0, i = 0; i < k; r++, i += kPackColumns)
        dequant_run<Code>(out + i, codes + r * Code::kBytes, set1(grids[r / w.runs]),
                          set1(grids[w.groups + r / w.runs]),
                          k - i < kPackColumns ? k - i : kPackColumns);
}

#if defined(MILL_BF16) && !defined(MILL_BF16_AS_FP32)
// As group_linear, of many rows: with weights rounded to bfloat16.
template <class Code, class StoreOut>
void bf16_group_linear(const bf16* x, const Grouped<Code>& w, int64_t rows, int64_t k, int64_t n,
                       const StoreOut& store_out) {
    multiply_panels<Bf16PairDot>(
        x, rows, k, n,
        [&](__m512i* panel, int64_t from, int64_t to) {
            thread_local Scratch scratch, row_scratch;
            bf16* weights = row_scratch.get<bf16>(k);
            pack_panel<Bf16PairDot>(panel, from, to, k, [&](int64_t row) {
                dequant_row(weights, w, row, k, w.grids(row, 1, scratch));
                return weights;
            });
        },
        store_out);
}
#endif

// out[rows, n] = x[rows, k] · weight[n, k]ᵀ + bias. scale, offset: [n, groups]; group: columns, a
// multiple of 32.
template <class Code>
void group_linear(void* out, const void* x, const uint8_t* codes, const void* scale,
                  const void* offset, const void* bias, int64_t rows, int64_t k, int64_t n,
                  int64_t group, int dtype, int scale_type) {
    const int64_t runs = (k + kPackColumns - 1) / kPackColumns, groups = (k + group - 1) / group;
    const Grouped<Code> w{
        codes, scale, offset, scale_type, runs * Code::kBytes, groups, group / kPackColumns};
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* target = static_cast<T*>(out);
        const T* bias_values = static_cast<const T*>(bias);
        const auto store_out = [=](int64_t m, int64_t j, const float* sums, int count) {
            for_each_vector(count, [&](int64_t i, int c) {
                const vf result = take(sums + i, c);
                put(target + m * n + j + i,
                    bias_values ? add(result, take(bias_values + j + i, c)) : result, c);
            });
        };
        thread_local Scratch scratch;
        const T* input = static_cast<const T*>(x);
#if defined(MILL_BF16) && !defined(MILL_BF16_AS_FP32)
        if constexpr (std::is_same_v<T, bf16>)
            if (rows >= kMinPanelRows) return bf16_group_linear(input, w, rows, k, n, store_out);
#endif
        if constexpr (kBlockFloatingPoint<T>)
            fixed_point_group_linear(scratch, input, w, rows, k, n, store_out);
        else
            float_group_linear(scratch, input, w, rows, k, n, store_out);
    });
}

// Dequantizes `n` rows to out[n, k], for many rows of x, where torch's GEMM is faster.
template <class Code>
void group_dequant(void* out, const uint8_t* codes, const void* scale, const void* offset,
                   int64_t k, int64_t n, int64_t group, int dtype, int scale_type) {
    const UseTorchThreads team(true);
    const int64_t runs = (k + kPackColumns - 1) / kPackColumns, groups = (k + group - 1) / group;
    const Grouped<Code> w{
        codes, scale, offset, scale_type, runs * Code::kBytes, groups, group / kPackColumns};
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for_rows(n, k * static_cast<int64_t>(sizeof(T)), [&](int64_t from, int64_t to) {
            for (int64_t j = from; j < to; j++) {
                T* row = static_cast<T*>(out) + j * k;
                thread_local Scratch scratch;
                dequant_row(row, w, j, k, w.grids(j, 1, scratch));
            }
        });
    });
}

}  // namespace mill

// The C functions of a weight format: its GEMM, and the dequantization for many rows.
#define MILL_GROUPWISE_FUNCTIONS(linear, dequant, Code)                                            \
    extern "C" void linear(void* out, const void* x, const uint8_t* codes, const void* scale,      \
                           const void* offset, const void* bias, int64_t rows, int64_t k,          \
                           int64_t n, int64_t group, int dtype, int scale_type) {                  \
        mill::group_linear<mill::Code>(out, x, codes, scale, offset, bias, rows, k, n, group,      \
                                       dtype, scale_type);                                         \
    }                                                                                              \
    extern "C" void dequant(void* out, const uint8_t* codes, const void* scale,                    \
                            const void* offset, int64_t k, int64_t n, int64_t group, int dtype,    \
                            int scale_type) {                                                      \
        mill::group_dequant<mill::Code>(out, codes, scale, offset, k, n, group, dtype,             \
                                        scale_type);                                               \
    }
