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

MILL_GROUPWISE_FUNCTIONS(mxfp4_linear, mxfp4_dequant, E2M1Codes)
