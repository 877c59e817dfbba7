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

extern "C" void int8_group_linear(void* out, const void* x, const uint8_t* codes, const void* scale,
                                  const void* offset, const void* bias, int64_t rows, int64_t k,
                                  int64_t n, int64_t group, int dtype, int half) {
    mill::group_linear<mill::Int8Codes>(out, x, codes, scale, offset, bias, rows, k, n, group,
                                        dtype, half);
}

extern "C" void int8_group_dequant(void* out, const uint8_t* codes, const void* scale,
                                   const void* offset, int64_t k, int64_t n, int64_t group,
                                   int dtype, int half) {
    mill::group_dequant<mill::Int8Codes>(out, codes, scale, offset, k, n, group, dtype, half);
}
