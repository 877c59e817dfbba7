// Groupwise int8 GEMM: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ + bias, and the dequantization
// for many rows (groupwise.h). Called by the ops int8_group_linear and decode.
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
