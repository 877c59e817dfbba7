// What CUDA C++ knows without a header: words, vector types, a warp's exchanges, arithmetic with
// names.
#pragma once
#include "machine.h"
#include <algorithm>
#include <cmath>

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __ldg(pointer) (*(pointer))
#define __expf(x) std::exp(x)
#define __fdividef(x, y) ((x) / (y))
using std::max;
using std::min;

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From> inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }

// Half to even, held at the type's ends; what is no number becomes 0 there and 0 here.
inline int __float2int_rn(float x) {
    if (std::isnan(x)) return 0;
    return static_cast<int>(
        std::fmin(std::fmax(std::nearbyint(static_cast<double>(x)), -2147483648.0), 2147483647.0));
}
inline unsigned __float2uint_rn(float x) {
    if (std::isnan(x)) return 0;
    return static_cast<unsigned>(
        std::fmin(std::fmax(std::nearbyint(static_cast<double>(x)), 0.0), 4294967295.0));
}

inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
    const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned got = 0;
    for (int i = 0; i < 4; ++i)
        got |= static_cast<unsigned>(both >> 8 * (pick >> 4 * i & 7) & 255) << 8 * i;
    return got;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; ++i)
        sum += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
    return sum;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16;
}

inline unsigned __cvta_generic_to_shared(const void* pointer) { return emu::offset_of(pointer); }
inline void __syncthreads() { emu::meet(0, blockDim.x); }
inline void __syncwarp() { emu::shown({}); }

template <typename T> inline T of_lane(T mine, unsigned from) {
    return same_bits<T>(emu::shown({{same_bits<unsigned>(mine)}})[from].word[0]);
}
template <typename T> inline T __shfl_sync(unsigned, T mine, int from) {
    return of_lane(mine, from % 32);
}
template <typename T> inline T __shfl_xor_sync(unsigned, T mine, int by) {
    return of_lane(mine, threadIdx.x % 32 ^ by);
}
template <typename T> inline T __shfl_down_sync(unsigned, T mine, int by) {
    const unsigned lane = threadIdx.x % 32;
    return of_lane(mine, lane + by < 32 ? lane + by : lane);
}
inline unsigned __reduce_max_sync(unsigned, unsigned mine) {
    const emu::Words* all = emu::shown({{mine}});
    for (int lane = 0; lane < 32; ++lane) mine = max(mine, all[lane].word[0]);
    return mine;
}
