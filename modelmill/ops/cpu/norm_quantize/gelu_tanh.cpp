// Tanh GELU.
//
// Computes: out = gelu_tanh(x), elementwise
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: contiguous
// Range: any M
// Technique: SIMD exp (simd.h), thread pool
// Ops: gelu_tanh
#include "norm_quantize/activation.h"
#include "common/parallel_for.h"

extern "C" void gelu_tanh(void* out, const void* x, int64_t count, int dtype) {
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::parallel_for(count, 4096, count * 8, [&](int64_t from, int64_t to) {
            mill::gelu_tanh_row(static_cast<T*>(out) + from, static_cast<const T*>(x) + from,
                                to - from);
        });
    });
}
