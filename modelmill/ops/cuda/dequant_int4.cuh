// 4-bit weights as 16-bit numbers, without a conversion.
//
// A pair of small numbers c is put into the lowest bits of a pair of RAISED: at that exponent the last bit is worth 1, so
// that the result reads as RAISED + c. What that adds to a product is RAISED times the sum of x, which is taken out with
// the offsets.
#pragma once
#include "dequant_int8.cuh"

#ifdef HALF
constexpr float RAISED = 1024.0f;
#else
constexpr float RAISED = 128.0f;
#endif
constexpr float MIDDLE = 8.0f; // a symmetric weight is scale · (code − MIDDLE)
constexpr u32 LOWER_CODES = 0x0F0F0F0Fu; // of packed bytes; the upper ones four bits to the left

// The codes at bits ``by`` and ``by`` + 16: (word >> by) & 0x000F000F | RAISED_PAIR, in one instruction behind the shift
// (0xEA is the truth table of a & b | c), where the compiler would take two.
__device__ inline u32 biased_int4_pair(u32 word, int by) {
    u32 both;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(both) : "r"(word >> by), "r"(RAISED_PAIR));
    return both;
}
