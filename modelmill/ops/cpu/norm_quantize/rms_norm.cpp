// RMSNorm by rows.
//
// Computes: out[M, N] = rmsnorm(x[M, N]) · weight[N]
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: row-major
// Range: any M
// Technique: SIMD (simd.h), thread pool
// Ops: rms_norm, decode
#include "norm_quantize/norm.h"
#include "common/ops.h"

extern "C" void rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t width,
                         double eps, int dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(rows, dtype));
    mill::for_each_row(rows, width, dtype, [&](auto* type, int64_t i) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::rms_norm_row(static_cast<T*>(out) + i, static_cast<const T*>(x) + i,
                           static_cast<const T*>(weight), width, static_cast<float>(eps));
    });
}
