// SIMD wrapper of all CPU kernels.
//
// Computes: vectors of W floats: load / load_n and store / store_n with conversion from and to
//     float32, bfloat16, float16 and int8; exp, horizontal sums and maxima
// Range: W = 16 (AVX-512), 8 (AVX2 + FMA + F16C) or 4 (portable C++)
// Technique: AVX-512, AVX2 + FMA + F16C, portable C++ vectors
// Used by: activation.h, block_floating_point.h, decode.cpp, flash_attention.h, gemm_small_m.h,
//     norm.h, rptq_linear.cpp, runtime.cpp, state_rows.h, upsample_masks.cpp, w8a8_linear.cpp
//
// A kernel is written once with these functions. The compiler's ISA macros select the
// implementation, so that any -march is correct.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#    define MILL_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define MILL_AVX2 1
#endif
#if defined(MILL_AVX512) && defined(__AVX512BF16__)
#    define MILL_BF16 1
#endif
#if defined(MILL_AVX512) || defined(MILL_AVX2)
#    include <immintrin.h>
#endif

namespace mill {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// Dtype codes shared with build.py.
enum Dtype { kFloat = 0, kBf16 = 1, kF16 = 2 };

template <class F> inline void by_dtype(int code, F&& f) {
    if (code == kFloat)
        f(static_cast<float*>(nullptr));
    else if (code == kBf16)
        f(static_cast<bf16*>(nullptr));
    else
        f(static_cast<f16*>(nullptr));
}

// ---- scalar conversions
inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return static_cast<float>(x); }
inline float to_float(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(f16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    // The exponent is moved by multiplication, which normalises subnormals as well; 2^112 = 2^(127
    // - 15).
    float wide = float_of(rest << 13) * 0x1p112f;
    if (rest >= 0x7c00u) wide = float_of((rest << 13) | 0x7f800000u);
    return float_of(bits_of(wide) | sign);
}
template <class T> inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
    const uint32_t u = bits_of(x);
    if (x != x) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <> inline f16 from_float<f16>(float x) {
    const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    // 65520 and above round to inf
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    // subnormal: adding 0.5 leaves the rounded value in the last bits
    if (magnitude < 0x38800000u) {
        return {static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u))};
    }
    const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

// ---- vectors
#if defined(MILL_AVX512)

constexpr int W = 16;
using vf = __m512;
inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // a NaN in b comes through
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
// Each lane: the sum of its 128-bit quarter.
inline vf sum_in_128_bits(vf a) {
    const vf pairs = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
    return _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xb1));
}
inline float sum(vf a) {
    const vf halves = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    return _mm512_cvtss_f32(
        sum_in_128_bits(_mm512_add_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xb1))));
}
// sum() of four vectors with the same order of additions.
inline void four_sums(float* out, const vf* a) {
    const vf x = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44),
                               _mm512_shuffle_f32x4(a[0], a[1], 0xee));
    const vf y = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x44),
                               _mm512_shuffle_f32x4(a[2], a[3], 0xee));
    const vf all = sum_in_128_bits(
        _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
}
inline float reduce_max(vf a) { return _mm512_reduce_max_ps(a); }

inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const bf16* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline vf load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vf load(const int8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline vf load_n(const bf16* p, int n) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}
inline vf load_n(const f16* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
inline vf load_n(const int8_t* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
}
inline __m256i narrow(vf v, bf16) {
#    if defined(MILL_BF16)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#    else
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#    endif
}
inline __m256i narrow(vf v, f16) {
    return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline void store_n(float* p, vf v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
template <class T> inline void store(T* p, vf v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v, T{}));
}
template <class T> inline void store_n(T* p, vf v, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(v, T{}));
}

// 2^n for integral n, below the smallest normal number 0.
inline vf pow2(vf n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
inline vf nearest(vf x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline vf zero_below(vf x, float limit, vf value) {
    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x, set1(limit), _CMP_LT_OQ), zero());
}

inline void transpose(vf* r) {
    vf t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        const vf ab = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88),
                 cd = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        const vf ef = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd),
                 gh = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_f32x4(ab, cd, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(ab, cd, 0xdd);
        t[i + 4] = _mm512_shuffle_f32x4(ef, gh, 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(ef, gh, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

#elif defined(MILL_AVX2)

constexpr int W = 8;
using vf = __m256;
inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline float sum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float reduce_max(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline vf load(const bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline vf load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf load(const int8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline __m128i narrow(vf v, bf16) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}
inline __m128i narrow(vf v, f16) {
    return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
template <class T> inline void store(T* p, vf v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v, T{}));
}
inline vf pow2(vf n) {
    // n reaches 128 (to infinity) and falls to −126: the callers keep it there.
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline vf nearest(vf x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline vf zero_below(vf x, float limit, vf value) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(limit), _CMP_LT_OQ), value);
}

#else

constexpr int W = 4;
struct vf {
    float lane[4];
};
#    define MILL_LANES(expression)                                                                 \
        vf r;                                                                                      \
        for (int i = 0; i < 4; i++) r.lane[i] = (expression);                                      \
        return r
inline vf zero() { return vf{{0, 0, 0, 0}}; }
inline vf set1(float x) { return vf{{x, x, x, x}}; }
inline vf add(vf a, vf b) { MILL_LANES(a.lane[i] + b.lane[i]); }
inline vf sub(vf a, vf b) { MILL_LANES(a.lane[i] - b.lane[i]); }
inline vf mul(vf a, vf b) { MILL_LANES(a.lane[i] * b.lane[i]); }
inline vf div(vf a, vf b) { MILL_LANES(a.lane[i] / b.lane[i]); }
inline vf fma(vf a, vf b, vf c) { MILL_LANES(a.lane[i] * b.lane[i] + c.lane[i]); }
inline vf max(vf a, vf b) { MILL_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
inline vf min(vf a, vf b) { MILL_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
inline float sum(vf a) { return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]); }
inline float reduce_max(vf a) {
    float t = a.lane[0];
    for (float x : a.lane) t = x > t ? x : t;
    return t;
}
template <class T> inline vf load(const T* p) { MILL_LANES(to_float(p[i])); }
template <class T> inline void store(T* p, vf v) {
    for (int i = 0; i < 4; i++) p[i] = from_float<T>(v.lane[i]);
}
inline vf pow2(vf n) {
    MILL_LANES(float_of(static_cast<uint32_t>(static_cast<int>(n.lane[i]) + 127) << 23));
}
inline vf nearest(vf x) { MILL_LANES(std::nearbyint(x.lane[i])); }
inline vf zero_below(vf x, float limit, vf v) { MILL_LANES(x.lane[i] < limit ? 0.0f : v.lane[i]); }

#endif

#if !defined(MILL_AVX512)
#    if defined(MILL_AVX2)
inline __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline vf load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline void store_n(float* p, vf v, int n) { _mm256_maskstore_ps(p, first(n), v); }
#    endif
template <class T> inline vf load_n(const T* p, int n) {
    T lanes[W];
    std::memset(lanes, 0, sizeof lanes);
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
    return load(lanes);
}
template <class T> inline void store_n(T* p, vf v, int n) {
    T lanes[W];
    store(lanes, v);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}
inline void transpose(vf* r) {
    float in[W][W], out[W][W];
    for (int i = 0; i < W; i++) store(in[i], r[i]);
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) out[i][j] = in[j][i];
    for (int i = 0; i < W; i++) r[i] = load(out[i]);
}
#endif

// out[i] = sum(a[i])
inline void sums_of(float* out, const vf* a, int count) {
    int i = 0;
#if defined(MILL_AVX512)
    for (; i + 4 <= count; i += 4) four_sums(out + i, a + i);
#endif
    for (; i < count; i++) out[i] = sum(a[i]);
}

template <class T> inline vf rounded(vf v) {  // to T's precision and back
    T lanes[W];
    store(lanes, v);
    return load(lanes);
}
template <> inline vf rounded<float>(vf v) { return v; }
#if defined(MILL_AVX512)
template <> inline vf rounded<bf16>(vf v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(v, bf16{})), 16));
}
template <> inline vf rounded<f16>(vf v) { return _mm512_cvtph_ps(narrow(v, f16{})); }
#endif

// Calls f(offset, count) for each vector of n elements; count is W except for the last one.
template <class F> inline void for_each_vector(int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + W <= n; i += W) f(i, W);
    if (i < n) f(i, static_cast<int>(n - i));
}
template <class T> inline vf take(const T* p, int n) { return n == W ? load(p) : load_n(p, n); }
template <class T> inline void put(T* p, vf v, int n) {
    if (n == W)
        store(p, v);
    else
        store_n(p, v, n);
}

// e^x to about one unit in the last place; 0 below -87.3, infinity above 88.7, NaN stays NaN.
inline vf exp(vf x) {
    const vf clamped = min(set1(89.0f), max(set1(-87.3f), x));
    const vf n = nearest(mul(clamped, set1(1.44269504088896341f)));
    // ln 2 in two parts: the first has few bits, so n times it is exact
    vf r = fma(n, set1(-0.693359375f), clamped);
    r = fma(n, set1(2.12194440e-4f), r);
    constexpr float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    vf p = set1(1.0f / 5040);
    for (const float c : series) p = fma(p, r, set1(c));
    return zero_below(x, -87.3f, mul(p, pow2(n)));
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace mill
