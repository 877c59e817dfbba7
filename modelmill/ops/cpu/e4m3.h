// fp8 (e4m3) as one more type that vectors are loaded from: 4 bits of exponent with a bias of 7, 3 of mantissa, no
// infinities. Moved to where float16 has its bits, a value lacks 2⁸; float16's subnormals are e4m3's. The codes of NaN
// would read as 480: nothing of ours stores them.
#pragma once
#include "dot.h"

namespace mill {

struct f8 { uint8_t bits; };

inline float to_float(f8 x) {
    const uint16_t half = static_cast<uint16_t>(((x.bits & 0x80u) << 8) | ((x.bits & 0x7fu) << 7));
    return to_float(f16{half}) * 256.0f;
}

#if defined(MILL_AVX512)
inline vf widened(__m128i raw) {
    const __m256i u = _mm256_cvtepu8_epi16(raw);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0x7f)), 7);
    return mul(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), set1(256.0f));
}
inline vf load(const f8* p) { return widened(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vf load_n(const f8* p, int n) { return widened(_mm_maskz_loadu_epi8(first(n), p)); }
#elif defined(MILL_AVX2)
inline vf load(const f8* p) {
    const __m128i u = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(u, _mm_set1_epi16(0x80)), 8);
    const __m128i rest = _mm_slli_epi16(_mm_and_si128(u, _mm_set1_epi16(0x7f)), 7);
    return mul(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), set1(256.0f));
}
#endif

}  // namespace mill
