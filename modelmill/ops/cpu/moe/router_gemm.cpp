// The router of a mixture of experts for few tokens.
//
// Computes: out[M, E] = x[M, H] · weight[E, H]ᵀ
// Dtypes: x and weight float32, bfloat16 or float16, both the same; out and sums float32
// Layout: row-major
// Range: any M, meant for few
// Technique: float FMA or exact products of bfloat16, software prefetch (gemm_small_m.h)
// Ops: router_gemm
#include "common/ops.h"
#include "gemm_16bit/gemm_large_m.h"

extern "C" void router_gemm(float* out, const void* x, const void* weight, int64_t rows,
                            int64_t hidden, int64_t experts, int dtype) {
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::multiply<mill::DotTraits<T>>(
            static_cast<const T*>(x), static_cast<const T*>(weight), rows, hidden, experts,
            [=](int64_t m, int64_t first, const float* sums, int count) {
                std::memcpy(out + m * experts + first, sums,
                            static_cast<size_t>(count) * sizeof(float));
            });
    });
}
