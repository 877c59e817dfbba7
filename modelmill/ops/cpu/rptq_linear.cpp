// Products of clustered integers (ops/rptq_linear.py): int8 dot products a group at a time, flushed to float.
#include "simd.h"
#include "parallel_for.h"

#include <algorithm>

namespace mill {

// 8 sums side by side. dot(acc, q, w): acc[i] += Σ of four (q + 128) · w. Signed inputs are stored with 128 added,
// since the instruction wants one unsigned side; `lifted` is what that adds, taken off before the flush.
#if defined(MILL_AVX512) && defined(__AVX512VNNI__)
using vi = __m256i;
inline vi none() { return _mm256_setzero_si256(); }
inline vi dot(vi acc, vi q, vi w) { return _mm256_dpbusd_epi32(acc, q, w); }
inline vi dot_bias128(vi acc, vi w) { return _mm256_dpbusd_epi32(acc, _mm256_set1_epi8(static_cast<char>(128)), w); }
inline vi minus(vi w) { return _mm256_sub_epi32(none(), w); }
inline vi run(const uint8_t* q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)); }
inline vi whole(const uint8_t* w) { return run(w); }
inline vi halves(const uint8_t* w) {  // 16 bytes → 32 codes, the low halves first
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)), low = _mm_set1_epi8(15);
    return _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), low), _mm_and_si128(both, low));
}
struct Sums {
    __m256 v = _mm256_setzero_ps();
    void flush(vi acc, float by) { v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), _mm256_set1_ps(by), v); }
    float total() const {
        float lane[8];
        _mm256_storeu_ps(lane, v);
        return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
};
#else
struct vi { int32_t lane[8]; };
struct Bytes { int16_t lane[32]; };
inline vi none() { return vi{{0, 0, 0, 0, 0, 0, 0, 0}}; }
inline vi dot(vi acc, const Bytes& q, const Bytes& w) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) acc.lane[i] += static_cast<int32_t>(q.lane[4 * i + j]) * w.lane[4 * i + j];
    return acc;
}
inline vi dot_bias128(vi acc, const Bytes& w) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) acc.lane[i] += 128 * w.lane[4 * i + j];
    return acc;
}
inline vi minus(vi w) {
    for (int i = 0; i < 8; i++) w.lane[i] = -w.lane[i];
    return w;
}
inline Bytes run(const uint8_t* q) {
    Bytes out;
    for (int i = 0; i < 32; i++) out.lane[i] = q[i];
    return out;
}
inline Bytes whole(const uint8_t* w) {
    Bytes out;
    for (int i = 0; i < 32; i++) out.lane[i] = static_cast<int8_t>(w[i]);
    return out;
}
inline Bytes halves(const uint8_t* w) {
    Bytes out;
    for (int i = 0; i < 16; i++) {
        out.lane[i] = w[i] & 15;
        out.lane[16 + i] = w[i] >> 4;
    }
    return out;
}
struct Sums {
    float lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    void flush(const vi& acc, float by) {
        for (int i = 0; i < 8; i++) lane[i] += static_cast<float>(acc.lane[i]) * by;
    }
    float total() const {
        return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
};
#endif

struct RptqWeight {
    const uint8_t* codes;
    const void *scale, *offset;
    bool half, packed;
    int64_t bytes, groups, runs;  // bytes: of a row; runs: of 32 columns in a group

    const uint8_t* at(int64_t n, int64_t r) const { return codes + n * bytes + r * (packed ? 16 : 32); }
    float grid(const void* source, int64_t i) const {
        return half ? to_float(static_cast<const f16*>(source)[i]) : static_cast<const float*>(source)[i];
    }
};

// Inputs as the kernel wants them: q + 128 [rows, columns]; step [rows or 1, groups]; totals Σ q · step [rows, groups].
struct Inputs {
    const uint8_t* q;
    const float *step, *totals;
    int64_t columns, each;  // each: 0 where all rows share their steps, else the groups
};

template <bool PACKED, int MB, int NB>
__attribute__((noinline)) void rptq_block(float* out, const Inputs& x, const RptqWeight& w, const float* scales,
                                               const float* offsets, int64_t m0, int64_t n0) {
    Sums all[MB][NB];
    for (int64_t g = 0; g < w.groups; g++) {
        vi acc[MB][NB], more[NB];
        for (int n = 0; n < NB; n++) {
            more[n] = none();
            for (int m = 0; m < MB; m++) acc[m][n] = none();
        }
        for (int64_t r = g * w.runs; r < (g + 1) * w.runs; r++)
            for (int n = 0; n < NB; n++) {
                const uint8_t* p = w.at(n0 + n, r);
                const auto values = PACKED ? halves(p) : whole(p);
                more[n] = dot_bias128(more[n], values);
                for (int m = 0; m < MB; m++) acc[m][n] = dot(acc[m][n], run(x.q + (m0 + m) * x.columns + r * 32), values);
            }
        for (int n = 0; n < NB; n++) {
            const float s = scales[n * w.groups + g];
#if defined(MILL_AVX512) && defined(__AVX512VNNI__)
            for (int m = 0; m < MB; m++)
                all[m][n].flush(_mm256_sub_epi32(acc[m][n], more[n]), s * x.step[(m0 + m) * x.each + g]);
#else
            for (int m = 0; m < MB; m++) {
                for (int i = 0; i < 8; i++) acc[m][n].lane[i] -= more[n].lane[i];
                all[m][n].flush(acc[m][n], s * x.step[(m0 + m) * x.each + g]);
            }
#endif
        }
    }
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) {
            float rest = 0;
            if (offsets)
                for (int64_t g = 0; g < w.groups; g++)
                    rest += offsets[n * w.groups + g] * x.totals[(m0 + m) * w.groups + g];
            out[m * NB + n] = all[m][n].total() + rest;
        }
}

template <bool PACKED, int NB, class Put>
inline void rptq_rows(const Inputs& x, const RptqWeight& w, int64_t m, int64_t last, int64_t n0, const Put& put) {
    thread_local Scratch scratch;
    const int64_t count = NB * w.groups;
    float* scales = scratch.get<float>(2 * count);
    float* offsets = w.offset ? scales + count : nullptr;
    for (int64_t i = 0; i < count; i++) {
        scales[i] = w.grid(w.scale, n0 * w.groups + i);
        if (offsets) offsets[i] = w.grid(w.offset, n0 * w.groups + i);
    }
    const auto some = [&](auto rows) {
        constexpr int MB = decltype(rows)::value;
        for (; m + MB <= last; m += MB) {
            float sums[MB * NB];
            rptq_block<PACKED, MB, NB>(sums, x, w, scales, offsets, m, n0);
            for (int i = 0; i < MB; i++)
                for (int n = 0; n < NB; n++) put(m + i, n0 + n, sums[i * NB + n]);
        }
    };
    some(std::integral_constant<int, 4>());
    some(std::integral_constant<int, 1>());
}

template <bool PACKED, class Put>
inline void rptq_gemm(const Inputs& x, const RptqWeight& w, int64_t rows, int64_t n, const Put& put) {
    const int64_t block = 64, blocks = (rows + block - 1) / block;
    int64_t step = (rows > 16 ? 128 << 10 : 32 << 10) / w.bytes / 8 * 8 + 8;
    const int64_t even = n * blocks / 16 / 4 * 4 + 4;
    if (step > even) step = even;
    const int64_t cuts = (n + step - 1) / step;
    share(blocks * cuts, 1, n * w.bytes * (rows + 3) / 4, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) {
            const int64_t m = i / cuts * block, from = i % cuts * step;
            const int64_t last = m + block < rows ? m + block : rows, to = from + step < n ? from + step : n;
            int64_t j = from;
            for (; j + 4 <= to; j += 4) rptq_rows<PACKED, 4>(x, w, m, last, j, put);
            for (; j < to; j++) rptq_rows<PACKED, 1>(x, w, m, last, j, put);
        }
    });
}

// The largest magnitude; NaN where a value is no number (it loses every comparison).
inline float extent(const float* x, int64_t n) {
    vf found = zero(), bad = zero();
    each(n, [&](int64_t i, int c) {
        const vf v = take(x + i, c);
        found = max(max(v, sub(zero(), v)), found);
        bad = fma(v, zero(), bad);  // 0, or NaN where a value is not finite
    });
    if (sum(bad) == 0.0f) return top(found);
    float most = 0.0f;
    for (int64_t i = 0; i < n && most == most; i++)
        if (x[i] != x[i] || std::fabs(x[i]) > most) most = std::fabs(x[i]);
    return most;
}

}  // namespace mill

// out[rows, n] (dtype) of q [rows, columns] int8. dynamic: step is [rows, groups]; half: scale and offset are float16.
extern "C" void rptq_linear(void* out, const int8_t* q, const uint8_t* codes, const void* scale,
                                 const void* offset, const float* step, const float* constant, const void* bias,
                                 int64_t rows, int64_t columns, int64_t n, int64_t group, int dtype, int half,
                                 int packed, int dynamic) {
    using namespace mill;
    const int64_t groups = columns / group;
    const RptqWeight w{codes, scale, offset, half != 0, packed != 0, packed ? columns / 2 : columns, groups, group / 32};
    thread_local Scratch scratch;
    float* totals = scratch.get<float>(rows * groups + (rows * columns + 3) / 4);
    uint8_t* raised = reinterpret_cast<uint8_t*>(totals + rows * groups);
    for (int64_t i = 0; i < rows * columns; i++) raised[i] = static_cast<uint8_t>(q[i]) ^ 128;
    const Inputs x{raised, step, totals, columns, dynamic ? groups : 0};
    if (offset)
        for (int64_t m = 0; m < rows; m++)
            for (int64_t g = 0; g < groups; g++) {
                int32_t total = 0;
                for (int64_t i = g * group; i < (g + 1) * group; i++) total += q[m * columns + i];
                totals[m * groups + g] = static_cast<float>(total) * step[m * x.each + g];
            }
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* target = static_cast<T*>(out);
        const T* added = static_cast<const T*>(bias);
        const auto put = [=](int64_t m, int64_t j, float value) {
            if (constant) value += constant[j];
            if (added) value += to_float(added[j]);
            target[m * n + j] = from_float<T>(value);
        };
        if (packed) rptq_gemm<true>(x, w, rows, n, put);
        else rptq_gemm<false>(x, w, rows, n, put);
    });
}

// q[rows, columns] of x [rows, width] (gated: [rows, 2 · width]); factor null: steps of their own a row and group.
extern "C" void rptq_quant(int8_t* q, float* steps, const void* x, const int32_t* order, const float* factor,
                              const int32_t* zero, int64_t rows, int64_t width, int64_t columns, int64_t group,
                              int bits, int gated, int dtype) {
    using namespace mill;
    const float most = static_cast<float>((1 << (bits - 1)) - 1), least = -most - (zero ? 1.0f : 0.0f);
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for_rows(rows, columns * 16, [&](int64_t from, int64_t to) {
            thread_local Scratch scratch;
            float* row = scratch.get<float>(width + columns);
            float* turned = row + width;
            for (int64_t m = from; m < to; m++) {
                if (gated) {
                    const T* gate = static_cast<const T*>(x) + m * 2 * width;
                    each(width, [&](int64_t i, int c) {
                        const vf g = take(gate + i, c);
                        const vf s = div(g, add(set1(1.0f), exp(sub(mill::zero(), g))));
                        put(row + i, rounded<T>(mul(rounded<T>(s), take(gate + width + i, c))), c);
                    });
                } else {
                    const T* given = static_cast<const T*>(x) + m * width;
                    each(width, [&](int64_t i, int c) { put(row + i, take(given + i, c), c); });
                }
                for (int64_t i = 0; i < columns; i++) turned[i] = order[i] < 0 ? 0.0f : row[order[i]];
                int8_t* target = q + m * columns;
                for (int64_t g = 0; g < columns; g += group) {
                    float by = 0.0f;
                    if (!factor) {
                        float top = extent(turned + g, group);
                        top = top < 1e-6f ? 1e-6f : top;
                        by = most / top;
                        steps[(m * columns + g) / group] = top / most;
                        if (!std::isfinite(top)) {  // the step tells it; no byte stands for what it is multiplied by
                            std::fill_n(target + g, group, static_cast<int8_t>(0));
                            continue;
                        }
                    }
                    for (int64_t i = g; i < g + group; i++) {
                        float value = std::nearbyint(turned[i] * (factor ? factor[i] : by));
                        if (zero) value += static_cast<float>(zero[i]);
                        value = value > least ? value : least;  // NaN too: a cast of it would not be defined
                        value = value < most ? value : most;
                        target[i] = order[i] < 0 ? 0 : static_cast<int8_t>(value);
                    }
                }
            }
        });
    });
}
