// Products with 4-bit weights (ops/int4_linear.py tells the layout): 16 bytes hold 32 columns of a row, the low halves
// the first 16. The codes become floats in registers; scales come in once a group, offsets meet the groups' sums of x.
#include "dot.h"

namespace mill {

constexpr int64_t kRun = 32;

// W bytes → the floats of their low and high halves.
#if defined(MILL_AVX512)
inline void halves(const uint8_t* p, vf& low, vf& high) {
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    low = _mm512_permutexvar_ps(wide, table);  // reads the lowest four bits of each index alone
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table);
}
#elif defined(MILL_AVX2)
inline void halves(const uint8_t* p, vf& low, vf& high) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    low = _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)));
    high = _mm256_cvtepi32_ps(_mm256_srli_epi32(wide, 4));
}
#else
inline void halves(const uint8_t* p, vf& low, vf& high) {
    for (int i = 0; i < W; i++) {
        low.lane[i] = static_cast<float>(p[i] & 15);
        high.lane[i] = static_cast<float>(p[i] >> 4);
    }
}
#endif

// A weight [n, k]: rows of `bytes` bytes, `groups` scales and offsets a row, in f16 (half) or float; offset may be null.
struct Int4 {
    const uint8_t* codes;
    const void* scale;
    const void* offset;
    bool half;
    int64_t bytes, groups, runs;  // runs: of 32 columns, in a group

    // `count` rows' scales, then their offsets, in float.
    float* grids(int64_t row, int64_t count, Scratch& scratch) const {
        float* out = scratch.get<float>(2 * count * groups);
        const int64_t from = row * groups, all = count * groups;
        copy(out, scale, from, all);
        if (offset) copy(out + all, offset, from, all);
        else each(all, [&](int64_t i, int c) { put(out + all + i, mul(set1(-8.0f), take(out + i, c)), c); });
        return out;
    }
    void copy(float* out, const void* source, int64_t from, int64_t count) const {
        if (half) each(count, [&](int64_t i, int c) { put(out + i, take(static_cast<const f16*>(source) + from + i, c), c); });
        else std::memcpy(out, static_cast<const float*>(source) + from, static_cast<size_t>(count) * sizeof(float));
    }
};

// sums[MB][NB] of MB rows of x (stride floats apart) and NB rows of the weight from n0.
template <int MB, int NB>
__attribute__((noinline)) void int4_block(float* sums, const float* x, int64_t stride, const float* total_x,
                                          const Int4& w, const float* grids, int64_t n0) {
    vf all[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) all[m][n] = zero();
    const uint8_t* rows = w.codes + n0 * w.bytes;
    const int64_t distance = ahead(NB * w.bytes), last = w.bytes / 16;
    for (int64_t g = 0, run = 0; g < w.groups; g++) {
        const int64_t end = run + w.runs < last ? run + w.runs : last;
        vf acc[MB][NB];
        for (int m = 0; m < MB; m++)
            for (int n = 0; n < NB; n++) acc[m][n] = zero();
        for (; run < end; run++) {
            if (run % 4 == 0)
                for (int n = 0; n < NB; n++) prefetch(rows + n * w.bytes + run * 16 + distance);
            for (int b = 0; b < 16; b += W) {
                const float* at = x + run * kRun + b;
                for (int n = 0; n < NB; n++) {
                    vf low, high;
                    halves(rows + n * w.bytes + run * 16 + b, low, high);
                    for (int m = 0; m < MB; m++) {
                        acc[m][n] = fma(low, load(at + m * stride), acc[m][n]);
                        acc[m][n] = fma(high, load(at + m * stride + 16), acc[m][n]);
                    }
                }
            }
        }
        for (int n = 0; n < NB; n++) {
            const vf s = set1(grids[n * w.groups + g]);
            for (int m = 0; m < MB; m++) all[m][n] = fma(s, acc[m][n], all[m][n]);
        }
    }
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) {
            float rest = 0;
            const float* offset = grids + (NB + n) * w.groups;
            for (int64_t g = 0; g < w.groups; g++) rest += offset[g] * total_x[m * w.groups + g];
            sums[m * NB + n] = sum(all[m][n]) + rest;
        }
}

template <int MB, int NB, class Put>
inline void int4_columns(const float* x, const float* total_x, int64_t stride, const Int4& w, const float* grids,
                         int64_t m0, int64_t n0, const Put& put_out) {
    float sums[MB * NB];
    int4_block<MB, NB>(sums, x + m0 * stride, stride, total_x + m0 * w.groups, w, grids, n0);
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) put_out(m0 + m, n0 + n, sums[m * NB + n]);
}

template <int NB, class Put>
inline void int4_rows(const float* x, const float* total_x, int64_t stride, const Int4& w, int64_t m, int64_t last,
                      int64_t n0, const Put& put_out) {
    thread_local Scratch scratch;
    const float* grids = w.grids(n0, NB, scratch);
    if constexpr (W == 16)
        for (; m + 6 <= last; m += 6) int4_columns<6, NB>(x, total_x, stride, w, grids, m, n0, put_out);
    for (; m + 4 <= last; m += 4) int4_columns<4, NB>(x, total_x, stride, w, grids, m, n0, put_out);
    for (; m + 2 <= last; m += 2) int4_columns<2, NB>(x, total_x, stride, w, grids, m, n0, put_out);
    if (m < last) int4_columns<1, NB>(x, total_x, stride, w, grids, m, n0, put_out);
}

// Halves of the codes, 16 bytes: out[32] = scale · code + offset.
template <class T> inline void widen_run(T* out, const uint8_t* p, vf s, vf o, int64_t count) {
    float wide[kRun];
    for (int b = 0; b < 16; b += W) {
        vf low, high;
        halves(p + b, low, high);
        store(wide + b, fma(low, s, o));
        store(wide + 16 + b, fma(high, s, o));
    }
    each(count, [&](int64_t i, int c) { put(out + i, take(wide + i, c), c); });
}

}  // namespace mill

// out[rows, n] = x[rows, k] · weight[n, k]ᵀ + bias. scale, offset: [n, groups]; group: columns, a multiple of 32.
extern "C" void int4_linear(void* out, const void* x, const uint8_t* codes, const void* scale, const void* offset,
                            const void* bias, int64_t rows, int64_t k, int64_t n, int64_t group, int dtype, int half) {
    using namespace mill;
    const int64_t runs = (k + kRun - 1) / kRun, stride = runs * kRun, groups = (k + group - 1) / group;
    const Int4 w{codes, scale, offset, half != 0, runs * 16, groups, group / kRun};
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        thread_local Scratch scratch;
        float* input = scratch.get<float>(rows * (stride + groups));
        float* total_x = input + rows * stride;
        const T* given = static_cast<const T*>(x);
        for (int64_t m = 0; m < rows; m++) {
            float* row = input + m * stride;
            each(k, [&](int64_t i, int c) { put(row + i, take(given + m * k + i, c), c); });
            std::memset(row + k, 0, static_cast<size_t>(stride - k) * sizeof(float));
            for (int64_t g = 0; g < groups; g++) {
                const int64_t end = (g + 1) * group < stride ? (g + 1) * group : stride;
                vf total = zero();
                for (int64_t i = g * group; i < end; i += W) total = add(total, load(row + i));
                total_x[m * groups + g] = sum(total);
            }
        }
        T* target = static_cast<T*>(out);
        const T* added = static_cast<const T*>(bias);
        const auto put_out = [=](int64_t m, int64_t j, float value) {
            if (added) value += to_float(added[j]);
            target[m * n + j] = from_float<T>(value);
        };
        const int64_t block = (kInputBlock / (stride * 4) / 12 + 1) * 12, blocks = (rows + block - 1) / block;
        int64_t piece = rows > 16 ? 128 << 10 : 32 << 10;
        const int64_t even = n * w.bytes * blocks / 16;
        if (piece > even) piece = even;
        const int64_t step = (piece / (w.bytes > 0 ? w.bytes : 1) / 8 + 1) * 8, cuts = (n + step - 1) / step;
        share(blocks * cuts, 1, n * w.bytes * (rows + 3) / 4, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                const int64_t m = i / cuts * block, from = i % cuts * step;
                const int64_t m1 = m + block < rows ? m + block : rows, to = from + step < n ? from + step : n;
                int64_t j = from;
                for (; j + 4 <= to; j += 4) int4_rows<4>(input, total_x, stride, w, m, m1, j, put_out);
                for (; j < to; j++) int4_rows<1>(input, total_x, stride, w, m, m1, j, put_out);
            }
        });
    });
}

// Rounded copies of `n` rows, [n, k], for products large enough that a library's blocked kernel wins.
extern "C" void int4_widen(void* out, const uint8_t* codes, const void* scale, const void* offset, int64_t k,
                           int64_t n, int64_t group, int dtype, int half) {
    using namespace mill;
    const BesideTorch team(true);
    const int64_t runs = (k + kRun - 1) / kRun, groups = (k + group - 1) / group;
    const Int4 w{codes, scale, offset, half != 0, runs * 16, groups, group / kRun};
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        share_rows(n, k * static_cast<int64_t>(sizeof(T)), [&](int64_t from, int64_t to) {
            for (int64_t j = from; j < to; j++) {
                T* row = static_cast<T*>(out) + j * k;
                thread_local Scratch scratch;
                const float* grids = w.grids(j, 1, scratch);
                for (int64_t r = 0; r < runs; r++) {
                    const int64_t g = r / w.runs, rest = k - r * kRun;
                    widen_run(row + r * kRun, codes + (j * runs + r) * 16, set1(grids[g]), set1(grids[groups + g]),
                              rest < kRun ? rest : kRun);
                }
            }
        });
    });
}
