// SwiGLU gate by rows.
//
// Computes: out[M, N] = silu(gate) · up of gate_up[M, 2 N]
// Dtypes: float32, bfloat16 or float16; float32 arithmetic
// Layout: row-major
// Range: any M
// Technique: SIMD exp (simd.h), thread pool
// Ops: silu_mul, decode
#include "norm_quantize/activation.h"
#include "common/ops.h"
#include "common/parallel_for.h"

// gate_up: [rows, 2 · inner]; out: [rows, inner].
extern "C" void silu_mul(void* out, const void* gate_up, int64_t rows, int64_t inner, int dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(rows, dtype));
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        // An exponential and a division cost about as much as streaming eight times the bytes.
        mill::parallel_for_rows(rows, inner * 8 * sizeof(T), [&](int64_t from, int64_t to) {
            for (int64_t r = from; r < to; r++) {
                const T* gate = static_cast<const T*>(gate_up) + r * 2 * inner;
                mill::silu_mul_row(static_cast<T*>(out) + r * inner, gate, gate + inner, inner);
            }
        });
    });
}
