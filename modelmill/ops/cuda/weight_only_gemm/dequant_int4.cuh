// 4-bit codes to 16-bit floats without a conversion instruction (the magic-number method of
//     FasterTransformer and Marlin).
//
// Computes: pairs of MAGIC + code from packed nibbles, with BASE_PAIR 0 of the code's bits alone
// Dtypes: 4-bit codes to bfloat16 or float16
// Layout: registers, a pair of codes in a 32-bit word
// Range: codes 0 … 15
// Technique: lop3 magic numbers
// Used by: code_base.cuh, int4_linear.cu, moe_fragments.cuh, rptq_linear.cu
//
// A pair of codes c is placed in the low mantissa bits of a pair of MAGIC: at that exponent the
// last bit is worth 1, so the result is MAGIC + c. The product then has MAGIC · sum(x) too much,
// which is subtracted together with the zero-point offsets.
#pragma once
#include "weight_only_gemm/dequant_int8.cuh"

#ifdef HALF
constexpr float MAGIC = 1024.0f;
#else
constexpr float MAGIC = 128.0f;
#endif
constexpr float INT4_ZERO_POINT = 8.0f;  // a symmetric weight is scale · (code − INT4_ZERO_POINT)
// of packed bytes; the high nibbles are 4 bits to the left
constexpr u32 LOW_NIBBLES = 0x0F0F0F0Fu;

// The codes at bits `shift` and `shift` + 16: (word >> shift) & 0x000F000F | BASE_PAIR by one lop3
// after the shift (0xEA is the truth table of a & b | c); the compiler would emit two instructions.
template <u32 BASE_PAIR = MAGIC_PAIR> __device__ inline u32 biased_int4_pair(u32 word, int shift) {
    u32 packed;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;"
        : "=r"(packed)
        : "r"(word >> shift), "r"(BASE_PAIR));
    return packed;
}
