// Groupwise int8 GEMM, and the dequantization for many rows.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ + bias
// Dtypes: x and out float32, bfloat16 or float16; int8 codes; float16 or float32 scales
// Layout: row-major; scales and offsets [N, groups]
// Range: any M (many rows: dequantized for torch's product where that is faster)
// Technique: AVX-512 FMA, software prefetch; AVX2 products of 16-bit integers
//     (block_floating_point.h), or FMA for float32
// Ops: int8_group_linear, decode
#include "weight_only_gemm/groupwise.h"
#include "common/ops.h"

MILL_GROUPWISE_FUNCTIONS(int8_group_linear, int8_group_dequant, Int8Codes)
