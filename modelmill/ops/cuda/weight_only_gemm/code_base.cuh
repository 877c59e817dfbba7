// 4-bit codes as 16-bit floats, in float16 without a base.
//
// Computes: pairs of (CODE_BASE + code) / CODE_SCALE from packed nibbles, and these constants
// Dtypes: 4-bit codes to bfloat16 or float16
// Layout: none of its own
// Range: BITS 4; with 8 bits there is neither base nor scale (dequant_int8.cuh)
// Technique: lop3 magic numbers, float16 subnormals
// Used by: wq_gemm_pipelined.cu, wq_gemm_small_m.cu
//
// In float16 c alone is the subnormal c / 2^24, which the tensor cores multiply exactly; its
// products need no sum(x) for the base. bfloat16's subnormals lack the bits: MAGIC + c.
//
// Macros: BITS, HALF.
#pragma once
#include "weight_only_gemm/dequant_int4.cuh"

#if BITS == 4 && defined(HALF)
constexpr u32 CODE_BASE_PAIR = 0;
constexpr float CODE_SCALE = 16777216.0f, CODE_BASE = 0.0f;
#else
constexpr u32 CODE_BASE_PAIR = MAGIC_PAIR;
constexpr float CODE_SCALE = 1.0f, CODE_BASE = BITS == 4 ? MAGIC : 0.0f;
#endif

// The codes at bits `shift` and `shift` + 16.
__device__ inline u32 code_pair(u32 word, int shift) {
    return biased_int4_pair<CODE_BASE_PAIR>(word, shift);
}
