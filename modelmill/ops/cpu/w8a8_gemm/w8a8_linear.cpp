// int8 by int8 GEMM.
//
// Computes: out[M, N] = (x[M, K] · weight[N, K]ᵀ) · x_scale · scale + bias
// Dtypes: x and weights int8; integer sums modulo 2³²; out float32, bfloat16 or float16
// Layout: row-major
// Range: any M
// Technique: AVX-512 VNNI (vpdpbusd), AVX-512 or AVX2 multiply-add, portable C++; software prefetch
// Ops: w8a8_linear
#include "common/simd.h"
#include "common/weight_stream.h"
#include "common/parallel_for.h"

namespace mill {

// rows of x are zero-padded to a multiple of this
constexpr int64_t kColumnAlignment = 64;
constexpr int64_t kInputBlock = 96 << 10;  // bytes of x per block (L2)

// sums of products
#if defined(MILL_AVX512)
using vi = __m512i;
inline vi zero_sum() { return _mm512_setzero_si512(); }
inline uint32_t reduce(vi total) { return static_cast<uint32_t>(_mm512_reduce_add_epi32(total)); }
#elif defined(MILL_AVX2)
using vi = __m256i;
inline vi zero_sum() { return _mm256_setzero_si256(); }
inline uint32_t reduce(vi total) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(s));
}
#else
struct vi {
    int32_t lane[16];
};
inline vi zero_sum() { return vi{}; }
inline uint32_t reduce(vi total) {
    uint32_t sum = 0;
    for (int32_t each : total.lane) sum += static_cast<uint32_t>(each);
    return sum;
}
#endif

#if defined(MILL_AVX512) && defined(__AVX512VNNI__)
// vpdpbusd multiplies unsigned by signed bytes: weights are loaded as w + 128, and 128 · Σ x is
// subtracted at the end.
constexpr int kStepColumns = 64;
constexpr bool kUnsignedWeights = true;
inline vi weights(const int8_t* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
inline vi weights_n(const int8_t* p, int n) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8((~0ull) >> (64 - n), p),
                            _mm512_set1_epi8(-128));
}
inline vi inputs(const int8_t* p) { return _mm512_loadu_si512(p); }
inline vi dot(vi total, vi w, vi x) { return _mm512_dpbusd_epi32(total, w, x); }
#elif defined(MILL_AVX512)
constexpr int kStepColumns = 32;
constexpr bool kUnsignedWeights = false;
inline vi weights(const int8_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vi weights_n(const int8_t* p, int n) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((~0u) >> (32 - n), p));
}
inline vi inputs(const int8_t* p) { return weights(p); }
inline vi dot(vi total, vi w, vi x) { return _mm512_add_epi32(total, _mm512_madd_epi16(w, x)); }
#elif defined(MILL_AVX2)
constexpr int kStepColumns = 16;
constexpr bool kUnsignedWeights = false;
inline vi weights(const int8_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vi inputs(const int8_t* p) { return weights(p); }
inline vi dot(vi total, vi w, vi x) { return _mm256_add_epi32(total, _mm256_madd_epi16(w, x)); }
#else
constexpr int kStepColumns = 16;
constexpr bool kUnsignedWeights = false;
inline vi weights(const int8_t* p) {
    vi r;
    for (int i = 0; i < 16; i++) r.lane[i] = p[i];
    return r;
}
inline vi inputs(const int8_t* p) { return weights(p); }
inline vi dot(vi total, vi w, vi x) {
    for (int i = 0; i < 16; i++) total.lane[i] += w.lane[i] * x.lane[i];
    return total;
}
#endif
#if !defined(MILL_AVX512)
inline vi weights_n(const int8_t* p, int n) {
    int8_t lanes[kStepColumns];
    std::memset(lanes, 0, sizeof lanes);
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return weights(lanes);
}
#endif

// sums[MB][NB] of MB rows of x (stride bytes apart, filled up) and NB rows of the weight [., k].
template <int MB, int NB>
__attribute__((noinline)) void whole_block(uint32_t* sums, const int8_t* x, int64_t stride,
                                           const int8_t* w, int64_t k) {
    vi total[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) total[m][n] = zero_sum();
    const int64_t distance = prefetch_distance<MB>(NB * k);
    int64_t i = 0;
    for (; i + kStepColumns <= k; i += kStepColumns) {
        if (i % 64 == 0)
            for (int n = 0; n < NB; n++) prefetch_line<MB>(w + n * k + i + distance);
        vi xs[MB];
        for (int m = 0; m < MB; m++) xs[m] = inputs(x + m * stride + i);
        for (int n = 0; n < NB; n++) {
            const vi ws = weights(w + n * k + i);
            for (int m = 0; m < MB; m++) total[m][n] = dot(total[m][n], ws, xs[m]);
        }
    }
    if (i < k) {
        for (int n = 0; n < NB; n++) {
            const vi ws = weights_n(w + n * k + i, static_cast<int>(k - i));
            for (int m = 0; m < MB; m++)
                total[m][n] = dot(total[m][n], ws, inputs(x + m * stride + i));
        }
    }
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) sums[m * NB + n] = reduce(total[m][n]);
}

template <int MB, int NB, class Put>
inline void whole_columns(const int8_t* x, const uint32_t* off, int64_t stride, const int8_t* w,
                          int64_t k, int64_t m0, int64_t n0, const Put& put_out) {
    uint32_t sums[MB * NB];
    whole_block<MB, NB>(sums, x + m0 * stride, stride, w + n0 * k, k);
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++)
            put_out(m0 + m, n0 + n, static_cast<int32_t>(sums[m * NB + n] - off[m0 + m]));
}

template <int NB, class Put>
inline void whole_rows(const int8_t* x, const uint32_t* off, int64_t stride, const int8_t* w,
                       int64_t k, int64_t m, int64_t last, int64_t n0, const Put& put_out) {
    if constexpr (W == 16)
        for (; m + 6 <= last; m += 6) whole_columns<6, NB>(x, off, stride, w, k, m, n0, put_out);
    for (; m + 4 <= last; m += 4) whole_columns<4, NB>(x, off, stride, w, k, m, n0, put_out);
    for (; m + 2 <= last; m += 2) whole_columns<2, NB>(x, off, stride, w, k, m, n0, put_out);
    if (m < last) whole_columns<1, NB>(x, off, stride, w, k, m, n0, put_out);
}

}  // namespace mill

// out[rows, n] = (x[rows, k] · weight[n, k]ᵀ) · x_scale · scale + bias. each_x: 1 where each row of
// x has its scale, 0 where one serves all.
extern "C" void w8a8_linear(void* out, const int8_t* x, const int8_t* weight, const float* scale,
                            const float* x_scale, const void* bias, int64_t rows, int64_t k,
                            int64_t n, int64_t each_x, int dtype) {
    using namespace mill;
    thread_local Scratch scratch, sums;
    const int64_t stride = (k + kColumnAlignment - 1) / kColumnAlignment * kColumnAlignment;
    const int8_t* input = x;
    if (stride != k) {
        int8_t* filled = scratch.get<int8_t>(rows * stride);
        for (int64_t m = 0; m < rows; m++) {
            std::memcpy(filled + m * stride, x + m * k, static_cast<size_t>(k));
            std::memset(filled + m * stride + k, 0, static_cast<size_t>(stride - k));
        }
        input = filled;
    }
    uint32_t* off = sums.get<uint32_t>(rows);
    for (int64_t m = 0; m < rows; m++) {
        uint32_t total = 0;
        if constexpr (kUnsignedWeights)
            for (int64_t i = 0; i < k; i++)
                total += static_cast<uint32_t>(static_cast<int32_t>(x[m * k + i]));
        off[m] = total * 128u;
    }
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* target = static_cast<T*>(out);
        const T* added = static_cast<const T*>(bias);
        const auto put_out = [=](int64_t m, int64_t j, int32_t total) {
            float value = static_cast<float>(total) * x_scale[m * each_x] * scale[j];
            if (added) value += to_float(added[j]);
            target[m * n + j] = from_float<T>(value);
        };
        const int64_t block = (kInputBlock / (stride > 0 ? stride : 1) / 12 + 1) * 12;
        const int64_t blocks = (rows + block - 1) / block, width = k > 0 ? k : 1;
        int64_t chunk_bytes = rows > 16 ? 128 << 10 : 64 << 10;
        // enough blocks for load balancing
        const int64_t max_chunk_bytes = n * width * blocks / 16;
        if (chunk_bytes > max_chunk_bytes) chunk_bytes = max_chunk_bytes;
        const int64_t step = (chunk_bytes / width / 8 + 1) * 8;
        parallel_for_tiles(rows, block, n, step, n * width * (rows + 7) / 8,
                           [&](int64_t m, int64_t m1, int64_t j, int64_t to) {
                               if (m1 - m == 1)
                                   for (; j + 8 <= to; j += 8)
                                       whole_columns<1, 8>(input, off, stride, weight, k, m, j,
                                                           put_out);
                               for (; j + 4 <= to; j += 4)
                                   whole_rows<4>(input, off, stride, weight, k, m, m1, j, put_out);
                               for (; j < to; j++)
                                   whole_rows<1>(input, off, stride, weight, k, m, m1, j, put_out);
                           });
    });
}
