// LayerNorm by rows.
//
// Computes: out[M, N] = layernorm(x[M, N]) · weight[N] + bias[N]
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: row-major
// Range: any M
// Technique: SIMD (simd.h), thread pool
// Ops: layer_norm
#include "norm_quantize/norm.h"

extern "C" void layer_norm(void* out, const void* x, const void* weight, const void* bias,
                           int64_t rows, int64_t width, double eps, int dtype) {
    mill::for_each_row(rows, width, dtype, [&](auto* type, int64_t i) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::layer_norm_row(static_cast<T*>(out) + i, static_cast<const T*>(x) + i,
                             static_cast<const T*>(weight), static_cast<const T*>(bias), width,
                             static_cast<float>(eps));
    });
}
