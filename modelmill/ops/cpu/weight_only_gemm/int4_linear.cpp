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

extern "C" void int4_linear(void* out, const void* x, const uint8_t* codes, const void* scale,
                            const void* offset, const void* bias, int64_t rows, int64_t k,
                            int64_t n, int64_t group, int dtype, int half) {
    mill::group_linear<mill::Int4Codes>(out, x, codes, scale, offset, bias, rows, k, n, group,
                                        dtype, half);
}

extern "C" void int4_dequant(void* out, const uint8_t* codes, const void* scale, const void* offset,
                             int64_t k, int64_t n, int64_t group, int dtype, int half) {
    mill::group_dequant<mill::Int4Codes>(out, codes, scale, offset, k, n, group, dtype, half);
}
