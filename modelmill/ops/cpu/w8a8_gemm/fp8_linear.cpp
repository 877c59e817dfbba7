// Weight-only or W8A8 fp8 GEMM.
//
// Computes: out[M, N] = (x[M, K] · weight[N, K]ᵀ) · scale (· x_scale) + bias
// Dtypes: weights e4m3; x e4m3, float32, bfloat16 or float16; float32 arithmetic
// Layout: row-major
// Range: any M
// Technique: fp8 to float in registers, AVX-512 or AVX2 FMA, software prefetch
// Ops: fp8_linear
#include "w8a8_gemm/e4m3.h"

namespace mill {

template <class X, class T>
inline void fp8_product(T* target, const X* x, const f8* weight, const float* scale,
                        const float* x_scale, const T* added, int64_t rows, int64_t k, int64_t n,
                        int64_t each_x) {
    const auto scaled = [=](vf sums, int64_t m, int64_t j, int c) {
        const vf some = mul(sums, take(scale + j, c));
        return x_scale ? mul(some, set1(x_scale[m * each_x])) : some;
    };
    multiply<FloatDot<f8>>(x, weight, rows, k, n, store_with_bias(target, added, n, scaled));
}

}  // namespace mill

// out[rows, n] = (x[rows, k] · weight[n, k]ᵀ) · scale (· x_scale) + bias, all widened to float in
// registers. x is fp8 where there is an x_scale, else of out's type. each_x: 1 where each row of x
// has its scale, 0 where one serves all.
extern "C" void fp8_linear(void* out, const void* x, const void* weight, const float* scale,
                           const float* x_scale, const void* bias, int64_t rows, int64_t k,
                           int64_t n, int64_t each_x, int dtype) {
    using namespace mill;
    const f8* w = static_cast<const f8*>(weight);
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* target = static_cast<T*>(out);
        const T* added = static_cast<const T*>(bias);
        if (x_scale)
            fp8_product(target, static_cast<const f8*>(x), w, scale, x_scale, added, rows, k, n,
                        each_x);
        else
            fp8_product(target, static_cast<const T*>(x), w, scale, x_scale, added, rows, k, n,
                        each_x);
    });
}
