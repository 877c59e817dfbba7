// The experts of a mixture with MXFP4 weights, for few tokens.
//
// Computes: out[M, H] = Σ topk_weights · down(act(gate) · up) (+ shared)
// Dtypes: x and out float32, bfloat16 or float16; packed e2m1 codes; e8m0 scales; float32 sums
// Layout: codes [E, N, K / 2] as in ops/int4_linear.py, the experts any number of bytes apart;
//     scales [E, N, K / 32]
// Range: any M, meant for few; H and I multiples of 32
// Technique: two pool calls for all experts (experts.h); AVX-512 VNNI products of bytes
//     (digit_planes.h), AVX2 products of 16-bit integers, or FMA
// Ops: mxfp4_fused_moe
#include "common/ops.h"
#include "moe/experts.h"

extern "C" void mxfp4_fused_moe(const void* words, double alpha, double limit, int dtype,
                                int scale_type) {
    mill::multiply_experts<mill::E2M1Codes>(*static_cast<const mill::ExpertsCall*>(words), alpha,
                                            limit, dtype, scale_type);
}
