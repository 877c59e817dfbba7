// Dense GEMM.
//
// Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ + bias
// Dtypes: float32, bfloat16 or float16; float32 accumulators
// Layout: row-major
// Range: any M (from 17 rows on torch's product: of bfloat16 where it is faster, of every type
//     without AVX2)
// Technique: AVX-512 or AVX2 FMA, AVX512_BF16 dot products, software prefetch
// Ops: linear, decode
#include "gemm_16bit/gemm_large_m.h"
#include "common/ops.h"

// out[rows, n] = x[rows, k] · weight[n, k]ᵀ + bias; bias may be null; all of one dtype.
extern "C" void linear(void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                       int64_t k, int64_t n, int dtype) {
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const auto unscaled = [](mill::vf sums, int64_t, int64_t, int) { return sums; };
        mill::multiply<mill::DotTraits<T>>(
            static_cast<const T*>(x), static_cast<const T*>(weight), rows, k, n,
            mill::store_with_bias(static_cast<T*>(out), static_cast<const T*>(bias), n, unscaled));
    });
}
