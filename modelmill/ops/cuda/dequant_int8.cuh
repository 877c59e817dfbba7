// Weights of 8 bits as 16-bit numbers, without a conversion: small numbers in the lowest bits of one whose last bit is worth 1.
#pragma once
#include "half_types.cuh"

#ifdef HALF
constexpr u32 RAISED_PAIR = 0x64006400u; // 1024 twice, ten bits behind its point
#else
constexpr u32 RAISED_PAIR = 0x43004300u; // 128, seven bits
#endif

// The bytes at bits 0 and 16 as signed numbers: the lower seven bits raised, less the sign's bit raised.
__device__ inline u32 dequant_int8_pair(u32 word) {
    u32 low, sign, both;
    asm("lop3.b32 %0, %1, 0x007F007F, %2, 0xEA;" : "=r"(low) : "r"(word), "r"(RAISED_PAIR));
    asm("lop3.b32 %0, %1, 0x00800080, %2, 0xEA;" : "=r"(sign) : "r"(word), "r"(RAISED_PAIR));
    asm("sub.rn." TYPE "x2 %0, %1, %2;" : "=r"(both) : "r"(low), "r"(sign));
    return both;
}
