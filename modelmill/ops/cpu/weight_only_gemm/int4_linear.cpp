// Groupwise int4 GEMM, and the dequantization for many rows.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ + bias
// Dtypes: x and out float32, bfloat16 or float16; packed int4 codes; float16 or float32 scales
// Layout: row-major; codes as in ops/int4_linear.py; scales and offsets [N, groups]
// Range: any M (many rows: dequantized for torch's product where that is faster)
// Technique: AVX-512 table lookup, FMA, software prefetch; AVX2 shifts and products of 16-bit
//     integers (block_floating_point.h), or FMA for float32
// Ops: int4_linear, decode
#include "weight_only_gemm/groupwise.h"
#include "common/ops.h"

MILL_GROUPWISE_FUNCTIONS(int4_linear, int4_dequant, Int4Codes)
