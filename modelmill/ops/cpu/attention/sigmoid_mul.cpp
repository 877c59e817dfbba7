// The gate of an attention's output.
//
// Computes: out[M, N] = x · sigmoid(gate)
// Dtypes: x, gate and out float32, bfloat16 or float16, all the same; float32 arithmetic
// Layout: contiguous
// Range: any M
// Technique: SIMD exp (simd.h), thread pool
// Ops: sigmoid_mul
#include "norm_quantize/activation.h"
#include "common/parallel_for.h"

extern "C" void sigmoid_mul(void* out, const void* x, const void* gate, int64_t rows, int64_t width,
                            int dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(rows, dtype));
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        // An exponential and a division cost about as much as streaming eight times the bytes.
        mill::parallel_for_rows(rows, width * 8 * sizeof(T), [&](int64_t from, int64_t to) {
            const int64_t first = from * width;
            const T* values = static_cast<const T*>(x) + first;
            const T* gates = static_cast<const T*>(gate) + first;
            mill::for_each_vector((to - from) * width, [&](int64_t i, int c) {
                const mill::vf value = mill::take(values + i, c);
                mill::put(static_cast<T*>(out) + first + i,
                          mill::sigmoid_times(value, mill::take(gates + i, c)), c);
            });
        });
    });
}
