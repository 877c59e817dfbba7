// Residual add and RMSNorm by rows; the sum overwrites the residual.
//
// Computes: residual[M, N] += x[M, N]; out[M, N] = rmsnorm(residual) · weight[N]
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: row-major
// Range: any M
// Technique: SIMD (simd.h), thread pool
// Ops: add_rms_norm, decode
#include "norm_quantize/norm.h"
#include "common/ops.h"
#include "common/parallel_for.h"

// residual receives x + residual; out its norm.
extern "C" void add_rms_norm(void* out, void* residual, const void* x, const void* weight,
                             int64_t rows, int64_t width, double eps, int dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(rows, dtype));
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::parallel_for_rows(rows, width * 4 * sizeof(T), [&](int64_t from, int64_t to) {
            for (int64_t r = from; r < to; r++)
                mill::add_rms_norm_row(
                    static_cast<T*>(out) + r * width, static_cast<T*>(residual) + r * width,
                    static_cast<const T*>(x) + r * width, static_cast<const T*>(weight), width,
                    static_cast<float>(eps));
        });
    });
}
