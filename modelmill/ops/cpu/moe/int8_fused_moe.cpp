// The experts of a mixture with int8 weights, a scale per row, for few tokens.
//
// Computes: out[M, H] = Σ topk_weights · down(act(gate) · up) (+ shared)
// Dtypes: x and out float32, bfloat16 or float16; int8 weights; float32 scales and sums
// Layout: weights [E, N, K], the experts any number of bytes apart
// Range: any M, meant for few; H and I multiples of 32
// Technique: two pool calls for all experts (experts.h); AVX-512 VNNI products of bytes
//     (digit_planes.h), AVX2 products of 16-bit integers, or FMA
// Ops: int8_fused_moe
#include "common/ops.h"
#include "moe/experts.h"

extern "C" void int8_fused_moe(const void* words, double alpha, double limit, int dtype,
                               int scale_type) {
    mill::multiply_experts<mill::Int8Codes>(*static_cast<const mill::ExpertsCall*>(words), alpha,
                                            limit, dtype, scale_type);
}
