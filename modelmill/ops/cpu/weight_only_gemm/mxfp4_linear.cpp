// MXFP4 GEMM, and the dequantization for many rows.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ + bias
// Dtypes: x and out float32, bfloat16 or float16; packed e2m1 codes; e8m0 scales
// Layout: row-major; codes as in ops/int4_linear.py; scales [N, groups]
// Range: any M (many rows: dequantized for torch's product where that is faster)
// Technique: AVX-512 or AVX2 table lookup, FMA, software prefetch; AVX2 products of 16-bit integers
//     (block_floating_point.h)
// Ops: mxfp4_linear
#include "weight_only_gemm/groupwise.h"

extern "C" void mxfp4_linear(void* out, const void* x, const uint8_t* codes, const void* scale,
                             const void* offset, const void* bias, int64_t rows, int64_t k,
                             int64_t n, int64_t group, int dtype, int scale_type) {
    mill::group_linear<mill::E2M1Codes>(out, x, codes, scale, offset, bias, rows, k, n, group,
                                        dtype, scale_type);
}

extern "C" void mxfp4_dequant(void* out, const uint8_t* codes, const void* scale,
                              const void* offset, int64_t k, int64_t n, int64_t group, int dtype,
                              int scale_type) {
    mill::group_dequant<mill::E2M1Codes>(out, codes, scale, offset, k, n, group, dtype, scale_type);
}
