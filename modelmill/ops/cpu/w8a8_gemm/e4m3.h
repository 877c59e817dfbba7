// fp8 e4m3 (4 exponent bits with bias 7, 3 mantissa bits, no infinities) as a load type of simd.h.
//
// Computes: float vectors from e4m3 bytes
// Dtypes: e4m3 to float32
// Layout: contiguous bytes
// Range: all 256 codes
// Technique: shifts to the bit positions of float16
// Used by: fp8_linear.cpp
//
// Shifted to the bit positions of float16, a value is too small by 2⁸; subnormals agree. The NaN
// codes (exponent and mantissa all ones) would read as 480, so they get the all-ones exponent of
// float16.
#pragma once
#include "gemm_16bit/gemm_large_m.h"

namespace mill {

struct f8 {
    uint8_t bits;
};

inline float to_float(f8 x) {
    const uint32_t rest = (x.bits & 0x7fu) << 7, nan_bit = (rest + 0x80u) & 0x4000u;
    const uint16_t half = static_cast<uint16_t>(((x.bits & 0x80u) << 8) | rest | nan_bit);
    return to_float(f16{half}) * 256.0f;
}

// Sign extension repeats the sign, so that one shift places all bits. Adding one in the last place
// carries into bit 14 only for NaN: that carry completes float16's all-ones exponent.
#if defined(MILL_AVX512)
inline vf widened(__m128i raw) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
    const __m256i number =
        _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m256i carried = _mm256_add_epi16(number, _mm256_set1_epi16(0x80));
    // number | (carried & 0x4000)
    const __m256i half =
        _mm256_ternarylogic_epi32(number, carried, _mm256_set1_epi16(0x4000), 0xf8);
    return mul(_mm512_cvtph_ps(half), set1(256.0f));
}
inline vf load(const f8* p) {
    return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf load_n(const f8* p, int n) { return widened(_mm_maskz_loadu_epi8(first(n), p)); }
#elif defined(MILL_AVX2)
inline vf load(const f8* p) {
    const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(raw), 7);
    const __m128i number = _mm_and_si128(shifted, _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    const __m128i carried = _mm_add_epi16(number, _mm_set1_epi16(0x80));
    const __m128i half = _mm_or_si128(number, _mm_and_si128(carried, _mm_set1_epi16(0x4000)));
    return mul(_mm256_cvtph_ps(half), set1(256.0f));
}
#endif

}  // namespace mill
