// RMSNorm of groups of channels with a SiLU gate, before it or behind it.
//
// Computes: out[M, N] = rmsnorm(x) · weight · silu(gate), rmsnorm(x · silu(gate)) · weight, or
//     x · silu(gate); a norm for each group of columns
// Dtypes: x float32; gate, weight and out float32, bfloat16 or float16, all the same; float32
//     arithmetic
// Layout: row-major, rows of the gate with a stride; weight[N], or one for all groups
// Range: any M
// Technique: SIMD exp (simd.h), thread pool
// Ops: gated_rms_norm
#include "norm_quantize/activation.h"
#include "norm_quantize/norm.h"

namespace {

// weight null: nothing is normed.
template <class T>
void gated_row(T* out, const float* x, const T* gate, const T* weight, int64_t n, float eps,
               bool gate_first) {
    using namespace mill;
    const auto gated = [&](int64_t i, int c) {
        const vf g = take(gate + i, c);
        return mul(take(x + i, c), sigmoid_times(g, g));
    };
    if (!weight) {
        for_each_vector(n, [&](int64_t i, int c) { put(out + i, gated(i, c), c); });
        return;
    }
    const float* source = x;
    if (gate_first) {
        thread_local Scratch scratch;
        float* products = scratch.get<float>(n);
        for_each_vector(n, [&](int64_t i, int c) { put(products + i, gated(i, c), c); });
        source = products;
    }
    const float total = squares(n, [&](int64_t i, int c) { return take(source + i, c); });
    const vf scale = set1(1.0f / std::sqrt(total / static_cast<float>(n) + eps));
    for_each_vector(n, [&](int64_t i, int c) {
        const vf normed = mul(mul(take(source + i, c), scale), take(weight + i, c));
        const vf g = take(gate + i, c);
        put(out + i, gate_first ? normed : mul(normed, sigmoid_times(g, g)), c);
    });
}

}  // namespace

// Shapes as in ops/gated_rms_norm.py; weight may be null, or be that of one group.
extern "C" void gated_rms_norm(void* out, const float* x, const void* gate, const void* weight,
                               int64_t tokens, int64_t groups, int64_t group, int64_t gate_stride,
                               double eps, int gate_first, int one_weight, int dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(tokens, dtype));
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        // An exponential and a division cost about as much as streaming eight times the bytes.
        mill::parallel_for_rows(tokens * groups, group * 32, [&](int64_t from, int64_t to) {
            for (int64_t row = from; row < to; row++) {
                const int64_t first = row % groups * group;
                const T* weights = static_cast<const T*>(weight);
                if (weights && !one_weight) weights += first;
                gated_row(static_cast<T*>(out) + row * group, x + row * group,
                          static_cast<const T*>(gate) + row / groups * gate_stride + first, weights,
                          group, static_cast<float>(eps), gate_first != 0);
            }
        });
    });
}
