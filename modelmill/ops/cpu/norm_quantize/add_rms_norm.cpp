// Residual add and RMSNorm of x[M, N] by rows (norm.h); the sum overwrites the residual. Called by
// the ops add_rms_norm and decode.
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
