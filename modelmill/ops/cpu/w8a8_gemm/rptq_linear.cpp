// RPTQ integer GEMM and activation quantization.
//
// Computes: out[M, N] = sum over groups of step · (scale · (q · w) + offset · sum(q)) + constant +
//     bias; rptq_quant: permuted int8 activations with static factors, dynamic steps, or static
//     factors and a longer step where a row would leave the range in a group
// Dtypes: q int8; weights int8 or packed int4; int32 sums of a group, float32 sums
// Layout: q[M, K], weights [N, K] row-major; scales and offsets [N, groups]
// Range: any M (rptq_quant: any M); groups of a multiple of 32 columns up to 65,536
// Technique: AVX-512 VNNI (vpdpbusd, 256-bit vectors), AVX2 multiply-add or portable C++, thread
//     pool
// Ops: rptq_linear, rptq_quant
#include "common/simd.h"
#include "common/parallel_for.h"

#include <algorithm>

namespace mill {

// Subtracted from codes of 4 bits, and added to the offset as so many scales. Codes are not
// negative: with a zero-point their sums are hundreds of times the output, and what is left after
// the offset took them away would be rounded as coarsely as they are.
constexpr int kMiddleCode = 8;

// 8 sums. dot(acc, q, w): acc[i] += Σ of four (q + 128) · w. vpdpbusd needs one unsigned operand,
// so q is stored with 128 added; dot_bias128 computes 128 · Σ w, which is subtracted before the
// flush. AVX2 multiplies signed 16-bit values instead: its `run` takes the 128 off again, and there
// is no bias. kOutputs: outputs of a block, as many as the registers hold sums of.
#if defined(MILL_AVX512) && defined(__AVX512VNNI__)
constexpr int kOutputs = 4;
using vi = __m256i;
inline vi zero_sums() { return _mm256_setzero_si256(); }
inline vi minus(vi a, vi b) { return _mm256_sub_epi32(a, b); }
inline vi dot(vi acc, vi q, vi w) { return _mm256_dpbusd_epi32(acc, q, w); }
inline vi dot_bias128(vi acc, vi w) {
    return _mm256_dpbusd_epi32(acc, _mm256_set1_epi8(static_cast<char>(128)), w);
}
inline vi run(const uint8_t* q) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)); }
inline vi load_codes(const uint8_t* w) { return run(w); }
inline vi load_nibbles(const uint8_t* w) {  // 16 bytes to 32 codes, low nibbles first
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)),
                  low = _mm_set1_epi8(15);
    const __m256i codes =
        _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), low), _mm_and_si128(both, low));
    return _mm256_sub_epi8(codes, _mm256_set1_epi8(kMiddleCode));
}
#elif defined(MILL_AVX2)
constexpr int kOutputs = 2;
using vi = __m256i;
struct Bytes {
    __m256i low, high;  // 16 values of 16 bits each
};
inline vi zero_sums() { return _mm256_setzero_si256(); }
inline vi minus(vi a, vi) { return a; }
inline vi dot(vi acc, const Bytes& q, const Bytes& w) {
    const vi both =
        _mm256_add_epi32(_mm256_madd_epi16(q.low, w.low), _mm256_madd_epi16(q.high, w.high));
    return _mm256_add_epi32(acc, both);
}
inline vi dot_bias128(vi acc, const Bytes&) { return acc; }
inline Bytes widen(__m128i low, __m128i high) {
    return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
}
inline Bytes load_codes(const uint8_t* w) {
    const __m128i* p = reinterpret_cast<const __m128i*>(w);
    return widen(_mm_loadu_si128(p), _mm_loadu_si128(p + 1));
}
inline Bytes run(const uint8_t* q) {
    const __m128i* p = reinterpret_cast<const __m128i*>(q);
    const __m128i top = _mm_set1_epi8(-128);
    return widen(_mm_xor_si128(_mm_loadu_si128(p), top),
                 _mm_xor_si128(_mm_loadu_si128(p + 1), top));
}
inline Bytes load_nibbles(const uint8_t* w) {  // 16 bytes to 32 codes, low nibbles first
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w)),
                  low = _mm_set1_epi8(15), middle = _mm_set1_epi8(kMiddleCode);
    return widen(_mm_sub_epi8(_mm_and_si128(both, low), middle),
                 _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(both, 4), low), middle));
}
#endif
#if (defined(MILL_AVX512) && defined(__AVX512VNNI__)) || defined(MILL_AVX2)
struct Sums {
    __m256 v = _mm256_setzero_ps();
    void flush(vi acc, float by) {
        v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc), _mm256_set1_ps(by), v);
    }
    float total() const {
        float lane[8];
        _mm256_storeu_ps(lane, v);
        return ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
               ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
};
#else
constexpr int kOutputs = 4;
struct vi {
    int32_t lane[8];
};
struct Bytes {
    int16_t lane[32];
};
inline vi zero_sums() { return vi{{0, 0, 0, 0, 0, 0, 0, 0}}; }
inline vi dot(vi acc, const Bytes& q, const Bytes& w) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++)
            acc.lane[i] += static_cast<int32_t>(q.lane[4 * i + j]) * w.lane[4 * i + j];
    return acc;
}
inline vi dot_bias128(vi acc, const Bytes& w) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) acc.lane[i] += 128 * w.lane[4 * i + j];
    return acc;
}
inline vi minus(vi a, const vi& b) {
    for (int i = 0; i < 8; i++) a.lane[i] -= b.lane[i];
    return a;
}
inline Bytes run(const uint8_t* q) {
    Bytes out;
    for (int i = 0; i < 32; i++) out.lane[i] = q[i];
    return out;
}
inline Bytes load_codes(const uint8_t* w) {
    Bytes out;
    for (int i = 0; i < 32; i++) out.lane[i] = static_cast<int8_t>(w[i]);
    return out;
}
inline Bytes load_nibbles(const uint8_t* w) {
    Bytes out;
    for (int i = 0; i < 16; i++) {
        out.lane[i] = static_cast<int16_t>((w[i] & 15) - kMiddleCode);
        out.lane[16 + i] = static_cast<int16_t>((w[i] >> 4) - kMiddleCode);
    }
    return out;
}
struct Sums {
    float lane[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    void flush(const vi& acc, float by) {
        for (int i = 0; i < 8; i++) lane[i] += static_cast<float>(acc.lane[i]) * by;
    }
    float total() const {
        return ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
               ((lane[2] + lane[6]) + (lane[3] + lane[7]));
    }
};
#endif

struct RptqWeight {
    const uint8_t* codes;
    const void *scale, *offset;
    bool half, packed;
    int64_t bytes, groups, runs;  // bytes: of a row; runs: of 32 columns in a group

    const uint8_t* at(int64_t n, int64_t r) const {
        return codes + n * bytes + r * (packed ? 16 : 32);
    }
    float grid(const void* source, int64_t i) const {
        return half ? to_float(static_cast<const f16*>(source)[i])
                    : static_cast<const float*>(source)[i];
    }
};

// Activations: q + 128 [rows, columns]; step [rows or 1, groups]; totals Σ q · step [rows, groups].
struct Inputs {
    const uint8_t* q;
    const float *step, *totals;
    int64_t columns, step_stride;  // step_stride: 0 if all rows share the steps, else groups
};

template <bool PACKED, int MB, int NB>
__attribute__((noinline)) void rptq_block(float* out, const Inputs& x, const RptqWeight& w,
                                          const float* scales, const float* offsets, int64_t m0,
                                          int64_t n0) {
    Sums all[MB][NB];
    for (int64_t g = 0; g < w.groups; g++) {
        vi acc[MB][NB], bias_sums[NB];
        for (int n = 0; n < NB; n++) {
            bias_sums[n] = zero_sums();
            for (int m = 0; m < MB; m++) acc[m][n] = zero_sums();
        }
        for (int64_t r = g * w.runs; r < (g + 1) * w.runs; r++) {
            decltype(run(x.q)) inputs[MB];
            for (int m = 0; m < MB; m++) inputs[m] = run(x.q + (m0 + m) * x.columns + r * 32);
            for (int n = 0; n < NB; n++) {
                const uint8_t* p = w.at(n0 + n, r);
                const auto values = PACKED ? load_nibbles(p) : load_codes(p);
                bias_sums[n] = dot_bias128(bias_sums[n], values);
                for (int m = 0; m < MB; m++) acc[m][n] = dot(acc[m][n], inputs[m], values);
            }
        }
        for (int n = 0; n < NB; n++) {
            const float s = scales[n * w.groups + g];
            for (int m = 0; m < MB; m++)
                all[m][n].flush(minus(acc[m][n], bias_sums[n]),
                                s * x.step[(m0 + m) * x.step_stride + g]);
        }
    }
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) {
            float offset_sum = 0;
            if (offsets)
                for (int64_t g = 0; g < w.groups; g++)
                    offset_sum += offsets[n * w.groups + g] * x.totals[(m0 + m) * w.groups + g];
            out[m * NB + n] = all[m][n].total() + offset_sum;
        }
}

template <bool PACKED, int NB, class StoreOut>
inline void rptq_rows(const Inputs& x, const RptqWeight& w, int64_t m, int64_t last, int64_t n0,
                      const StoreOut& put) {
    thread_local Scratch scratch;
    const int64_t count = NB * w.groups;
    float* scales = scratch.get<float>(2 * count);
    float* offsets = PACKED || w.offset ? scales + count : nullptr;
    for (int64_t i = 0; i < count; i++) {
        scales[i] = w.grid(w.scale, n0 * w.groups + i);
        if (offsets)
            offsets[i] = (w.offset ? w.grid(w.offset, n0 * w.groups + i) : 0.0f) +
                         (PACKED ? kMiddleCode * scales[i] : 0.0f);
    }
    const auto row_blocks = [&](auto rows) {
        constexpr int MB = decltype(rows)::value;
        for (; m + MB <= last; m += MB) {
            float sums[MB * NB];
            rptq_block<PACKED, MB, NB>(sums, x, w, scales, offsets, m, n0);
            for (int i = 0; i < MB; i++)
                for (int n = 0; n < NB; n++) put(m + i, n0 + n, sums[i * NB + n]);
        }
    };
    row_blocks(std::integral_constant<int, 4>());
    row_blocks(std::integral_constant<int, 1>());
}

template <bool PACKED, class StoreOut>
inline void rptq_gemm(const Inputs& x, const RptqWeight& w, int64_t rows, int64_t n,
                      const StoreOut& put) {
    const int64_t block = 64, blocks = (rows + block - 1) / block;
    int64_t step = (rows > 16 ? 128 << 10 : 32 << 10) / w.bytes / 8 * 8 + 8;
    const int64_t max_step = n * blocks / 16 / 4 * 4 + 4;
    if (step > max_step) step = max_step;
    parallel_for_tiles(rows, block, n, step, n * w.bytes * (rows + 3) / 4,
                       [&](int64_t m, int64_t last, int64_t j, int64_t to) {
                           for (; j + kOutputs <= to; j += kOutputs)
                               rptq_rows<PACKED, kOutputs>(x, w, m, last, j, put);
                           for (; j < to; j++) rptq_rows<PACKED, 1>(x, w, m, last, j, put);
                       });
}

// amax of a row; NaN if a value is NaN (max would drop it).
inline float row_amax(const float* x, int64_t n) {
    vf max_abs = zero(), nan_check = zero();
    for_each_vector(n, [&](int64_t i, int c) {
        const vf v = take(x + i, c);
        max_abs = max(max(v, sub(zero(), v)), max_abs);
        nan_check = fma(v, zero(), nan_check);  // 0, or NaN where a value is not finite
    });
    if (sum(nan_check) == 0.0f) return reduce_max(max_abs);
    float qmax = 0.0f;
    for (int64_t i = 0; i < n && qmax == qmax; i++)
        if (x[i] != x[i] || std::fabs(x[i]) > qmax) qmax = std::fabs(x[i]);
    return qmax;
}

}  // namespace mill

// out[rows, n] (dtype) of q [rows, columns] int8. dynamic: step is [rows, groups]; half: scale and
// offset are float16.
extern "C" void rptq_linear(void* out, const int8_t* q, const uint8_t* codes, const void* scale,
                            const void* offset, const float* step, const float* constant,
                            const void* bias, int64_t rows, int64_t columns, int64_t n,
                            int64_t group, int dtype, int half, int packed, int dynamic) {
    using namespace mill;
    const int64_t groups = columns / group;
    const RptqWeight w{codes,     scale,       offset,
                       half != 0, packed != 0, packed ? columns / 2 : columns,
                       groups,    group / 32};
    thread_local Scratch scratch;
    float* totals = scratch.get<float>(rows * groups + (rows * columns + 3) / 4);
    uint8_t* q_plus_128 = reinterpret_cast<uint8_t*>(totals + rows * groups);
    for (int64_t i = 0; i < rows * columns; i++) q_plus_128[i] = static_cast<uint8_t>(q[i]) ^ 128;
    const Inputs x{q_plus_128, step, totals, columns, dynamic ? groups : 0};
    if (offset || packed)
        for (int64_t m = 0; m < rows; m++)
            for (int64_t g = 0; g < groups; g++) {
                int32_t total = 0;
                for (int64_t i = g * group; i < (g + 1) * group; i++) total += q[m * columns + i];
                totals[m * groups + g] = static_cast<float>(total) * step[m * x.step_stride + g];
            }
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* target = static_cast<T*>(out);
        const T* bias_values = static_cast<const T*>(bias);
        const auto put = [=](int64_t m, int64_t j, float value) {
            if (constant) value += constant[j];
            if (bias_values) value += to_float(bias_values[j]);
            target[m * n + j] = from_float<T>(value);
        };
        if (packed)
            rptq_gemm<true>(x, w, rows, n, put);
        else
            rptq_gemm<false>(x, w, rows, n, put);
    });
}

// q[rows, columns] of x [rows, width] (gated: [rows, 2 · width]); factor null: dynamic steps per
// row and group; group_step: static ones, longer where a row would leave the range in a group.
extern "C" void rptq_quant(int8_t* q, float* steps, const void* x, const int32_t* perm,
                           const float* factor, const int32_t* zero, const float* group_step,
                           int64_t rows, int64_t width, int64_t columns, int64_t group, int bits,
                           int gated, int dtype) {
    using namespace mill;
    const float qmax = static_cast<float>((1 << (bits - 1)) - 1),
                qmin = -qmax - (zero ? 1.0f : 0.0f);
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        parallel_for_rows(rows, columns * 16, [&](int64_t from, int64_t to) {
            thread_local Scratch scratch;
            float* row = scratch.get<float>(width + columns);
            float* permuted = row + width;
            for (int64_t m = from; m < to; m++) {
                if (gated) {
                    const T* gate = static_cast<const T*>(x) + m * 2 * width;
                    for_each_vector(width, [&](int64_t i, int c) {
                        const vf g = take(gate + i, c);
                        const vf s = div(g, add(set1(1.0f), exp(sub(mill::zero(), g))));
                        put(row + i, rounded<T>(mul(rounded<T>(s), take(gate + width + i, c))), c);
                    });
                } else {
                    const T* input_row = static_cast<const T*>(x) + m * width;
                    for_each_vector(
                        width, [&](int64_t i, int c) { put(row + i, take(input_row + i, c), c); });
                }
                for (int64_t i = 0; i < columns; i++)
                    permuted[i] = perm[i] < 0 ? 0.0f : row[perm[i]];
                if (group_step)
                    for (int64_t i = 0; i < columns; i++)
                        if (perm[i] >= 0)
                            permuted[i] = std::nearbyint(permuted[i] * factor[i]) +
                                          static_cast<float>(zero[i]);
                int8_t* target = q + m * columns;
                for (int64_t g = 0; g < columns; g += group) {
                    float by = 0.0f;
                    if (steps) {
                        float top = row_amax(permuted + g, group);
                        const float least = group_step ? qmax : 1e-6f;
                        top = top < least ? least : top;
                        by = qmax / top;
                        const float step = group_step ? group_step[g / group] : 1.0f;
                        steps[(m * columns + g) / group] = top / qmax * step;
                        // not finite: the step carries it, the codes are 0
                        if (!std::isfinite(top)) {
                            std::fill_n(target + g, group, static_cast<int8_t>(0));
                            continue;
                        }
                    }
                    for (int64_t i = g; i < g + group; i++) {
                        float value = std::nearbyint(permuted[i] * (steps ? by : factor[i]));
                        if (zero && !steps) value += static_cast<float>(zero[i]);
                        // NaN too: a cast of it would not be defined
                        value = value > qmin ? value : qmin;
                        value = value < qmax ? value : qmax;
                        target[i] = perm[i] < 0 ? 0 : static_cast<int8_t>(value);
                    }
                }
            }
        });
    });
}
