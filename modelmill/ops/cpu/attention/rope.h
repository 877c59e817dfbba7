// One head row of q or k.
//
// Computes: RMSNorm (q/k norm), RoPE and logn scale of dim values
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: one contiguous row
// Range: any dim
// Technique: SIMD (simd.h)
// Used by: rope_cache.cpp
#pragma once
#include "norm_quantize/norm.h"

namespace mill {

// out, in: [dim] of T (may be the same); weight: [dim] or null; cosine, sine: [dim / 2] or null;
// scale: 1 for none. Rounds to T where the reference does, after the norm, after the rotation and
// after the scale.
template <class T>
inline void rope_row(T* out, const T* in, const T* weight, const float* cosine, const float* sine,
                     float scale, int64_t dim, float eps) {
    if (weight) {
        rms_norm_row(out, in, weight, dim, eps);
        in = out;
    }
    const vf factor = set1(scale);
    const bool scaled = scale != 1.0f;
    const auto finish = [&](T* p, vf v, int c) {
        put(p, scaled ? mul(rounded<T>(v), factor) : v, c);
    };
    if (cosine) {
        const int64_t half = dim / 2;
        for_each_vector(half, [&](int64_t i, int c) {
            const vf a = take(in + i, c), b = take(in + half + i, c);
            const vf co = take(cosine + i, c), si = take(sine + i, c);
            finish(out + i, sub(mul(a, co), mul(b, si)), c);
            finish(out + half + i, add(mul(b, co), mul(a, si)), c);
        });
    } else if (scaled || out != in) {
        for_each_vector(dim, [&](int64_t i, int c) { finish(out + i, take(in + i, c), c); });
    }
}

}  // namespace mill
