// Row functions of norms.
//
// Computes: RMSNorm, residual add + RMSNorm and LayerNorm over n columns
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: contiguous rows
// Range: any n
// Technique: SIMD (simd.h)
// Used by: add_rms_norm.cpp, gated_rms_norm.cpp, layer_norm.cpp, quantize.cpp, rms_norm.cpp, rope.h
#pragma once
#include "common/parallel_for.h"
#include "common/simd.h"

namespace mill {

// Calls f(type, i) for each row of activations [rows, width]: i is the place of its first value,
// and `type` a null pointer to their type.
template <class F> inline void for_each_row(int64_t rows, int64_t width, int dtype, const F& f) {
    by_dtype(dtype, [&](auto* type) {
        parallel_for_rows(rows, width * 2 * sizeof(*type), [&](int64_t from, int64_t to) {
            for (int64_t r = from; r < to; r++) f(type, r * width);
        });
    });
}

// Sum of squares of n values that `at(offset, count)` gives as vectors; four chains hide the
// latency of the adds.
template <class F> inline float squares(int64_t n, F&& at) {
    vf s[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            const vf v = at(i + j * W, W);
            s[j] = fma(v, v, s[j]);
        }
    for (; i < n; i += W) {
        const vf v = at(i, n - i < W ? static_cast<int>(n - i) : W);
        s[0] = fma(v, v, s[0]);
    }
    return sum(add(add(s[0], s[1]), add(s[2], s[3])));
}

// out = round(x · rsqrt(mean(x²) + eps)) · weight. out may be x.
template <class T>
inline void rms_norm_row(T* out, const T* x, const T* weight, int64_t n, float eps) {
    const float total = squares(n, [&](int64_t i, int c) { return take(x + i, c); });
    const vf scale = set1(1.0f / std::sqrt(total / static_cast<float>(n) + eps));
    for_each_vector(n, [&](int64_t i, int c) {
        put(out + i, mul(rounded<T>(mul(take(x + i, c), scale)), take(weight + i, c)), c);
    });
}

// residual += x, rounded; out = rms_norm(residual).
template <class T>
inline void add_rms_norm_row(T* out, T* residual, const T* x, const T* weight, int64_t n,
                             float eps) {
    const float total = squares(n, [&](int64_t i, int c) {
        const vf v = rounded<T>(add(take(x + i, c), take(residual + i, c)));
        put(residual + i, v, c);
        return v;
    });
    const vf scale = set1(1.0f / std::sqrt(total / static_cast<float>(n) + eps));
    for_each_vector(n, [&](int64_t i, int c) {
        put(out + i, mul(rounded<T>(mul(take(residual + i, c), scale)), take(weight + i, c)), c);
    });
}

// Two passes: the mean first, so that the variance does not cancel.
template <class T>
inline void layer_norm_row(T* out, const T* x, const T* weight, const T* bias, int64_t n,
                           float eps) {
    vf s[2] = {zero(), zero()};
    for_each_vector(n, [&](int64_t i, int c) { s[i / W % 2] = add(s[i / W % 2], take(x + i, c)); });
    const float mean = sum(add(s[0], s[1])) / static_cast<float>(n);
    const vf shift = set1(mean);
    vf d[2] = {zero(), zero()};
    float tail = 0.0f;
    for_each_vector(n, [&](int64_t i, int c) {
        if (c == W) {
            const vf v = sub(load(x + i), shift);
            d[i / W % 2] = fma(v, v, d[i / W % 2]);
        } else {
            for (int j = 0; j < c; j++) {
                const float v = to_float(x[i + j]) - mean;
                tail += v * v;
            }
        }
    });
    const float variance = (sum(add(d[0], d[1])) + tail) / static_cast<float>(n);
    const vf scale = set1(1.0f / std::sqrt(variance + eps));
    for_each_vector(n, [&](int64_t i, int c) {
        put(out + i,
            fma(mul(sub(take(x + i, c), shift), scale), take(weight + i, c), take(bias + i, c)), c);
    });
}

}  // namespace mill
