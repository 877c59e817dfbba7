// Row functions of activation functions.
//
// Computes: SiLU-and-multiply and tanh GELU of a row
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: contiguous rows
// Range: any row length
// Technique: SIMD exp (simd.h)
// Used by: experts.h, gated_rms_norm.cpp, gelu_tanh.cpp, sigmoid_mul.cpp, silu_mul.cpp, topk.h
#pragma once
#include "common/simd.h"

namespace mill {

inline vf sigmoid_times(vf x, vf argument) {  // x · σ(argument)
    return div(x, add(set1(1.0f), exp(sub(zero(), argument))));
}

// out = round(silu(gate)) · up
template <class T> inline void silu_mul_row(T* out, const T* gate, const T* up, int64_t n) {
    for_each_vector(n, [&](int64_t i, int c) {
        const vf g = take(gate + i, c);
        put(out + i, mul(rounded<T>(sigmoid_times(g, g)), take(up + i, c)), c);
    });
}

// 0.5·x·(1 + tanh(u)) is x·σ(2u), which loses no digits for negative x.
template <class T> inline void gelu_tanh_row(T* out, const T* x, int64_t n) {
    const vf linear = set1(1.5957691216057308f), cubic = set1(1.5957691216057308f * 0.044715f);
    for_each_vector(n, [&](int64_t i, int c) {
        const vf v = take(x + i, c);
        put(out + i, sigmoid_times(v, mul(v, fma(mul(v, v), cubic, linear))), c);
    });
}

}  // namespace mill
