// int8 weights to 16-bit floats without a conversion instruction.
//
// Computes: pairs of weights from the bytes of a word: the value is placed in the low mantissa bits
//     of MAGIC, whose last bit is worth 1
// Dtypes: int8 to bfloat16 or float16
// Layout: registers, four weights in a 32-bit word
// Range: -128 … 127
// Technique: lop3 magic numbers
// Used by: dequant_int4.cuh, int8_gemm_small_m.cu
#pragma once
#include "common/half_types.cuh"

#ifdef HALF
constexpr u32 MAGIC_PAIR = 0x64006400u;  // 1024 twice, ten bits behind its point
#else
constexpr u32 MAGIC_PAIR = 0x43004300u;  // 128, seven bits
#endif

// The bytes at bits 0 and 16 as signed numbers: (MAGIC + low seven bits) − (MAGIC + sign bit).
__device__ inline u32 dequant_int8_pair(u32 word) {
    u32 low, sign, packed;
    asm("lop3.b32 %0, %1, 0x007F007F, %2, 0xEA;" : "=r"(low) : "r"(word), "r"(MAGIC_PAIR));
    asm("lop3.b32 %0, %1, 0x00800080, %2, 0xEA;" : "=r"(sign) : "r"(word), "r"(MAGIC_PAIR));
    asm("sub.rn." TYPE "x2 %0, %1, %2;" : "=r"(packed) : "r"(low), "r"(sign));
    return packed;
}
