// Activation quantization by rows.
//
// Computes: values[M, N] = round(x[M, N] · inv_scale) with one static factor, or with dynamic
//     scales[M] = amax / 127
// Dtypes: x float32, bfloat16 or float16; values int8; float32 scales
// Layout: row-major
// Range: any M
// Technique: SIMD (simd.h), thread pool
// Ops: quantize
#include "norm_quantize/norm.h"
#include "common/parallel_for.h"

namespace mill {

// Stores n integers −127 … 127 of v as int8.
inline void store_int8(int8_t* p, vf v, int n) {
#if defined(MILL_AVX512)
    _mm512_mask_cvtepi32_storeu_epi8(p, first(n), _mm512_cvtps_epi32(v));
#else
    float wide[W];
    store(wide, v);
    for (int i = 0; i < n; i++) p[i] = static_cast<int8_t>(wide[i]);
#endif
}

// x · by, rounded half to even, clamped to ±127.
template <class T> inline void quantize_row(int8_t* out, const T* x, int64_t n, float by) {
    const vf factor = set1(by), most = set1(127.0f), least = set1(-127.0f);
    for_each_vector(n, [&](int64_t i, int c) {
        store_int8(out + i, max(min(nearest(mul(take(x + i, c), factor)), most), least), c);
    });
}

template <class T> inline float row_amax(const T* x, int64_t n) {
    vf max_abs = zero(), nan_check = zero();
    for_each_vector(n, [&](int64_t i, int c) {
        const vf v = take(x + i, c);
        max_abs = max(max(v, sub(zero(), v)), max_abs);
        nan_check = fma(v, zero(), nan_check);  // 0, or NaN where a value is no number
    });
    return reduce_max(max_abs) + sum(nan_check);
}

}  // namespace mill

// out[rows, n] = x in int8: by the factor given, or (null) by 127 / max(amax, 1e-6) of each row,
// whose inverses go to scales[rows].
extern "C" void quantize_int8(int8_t* out, float* scales, const void* x, const float* factor,
                              int64_t rows, int64_t n, int dtype) {
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::parallel_for_rows(rows, n * 2 * sizeof(T), [&](int64_t from, int64_t to) {
            for (int64_t r = from; r < to; r++) {
                const T* row = static_cast<const T*>(x) + r * n;
                float by;
                if (factor)
                    by = *factor;
                else {
                    float most = mill::row_amax(row, n);
                    if (most < 1e-6f) most = 1e-6f;
                    scales[r] = most / 127.0f;
                    by = 127.0f / most;
                }
                mill::quantize_row(out + r * n, row, n, by);
            }
        });
    });
}
