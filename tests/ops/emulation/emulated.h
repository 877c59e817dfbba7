// A block of CUDA threads on the CPU: each is a fiber; whatever waits for others gives way. Copies of the copy engine
// arrive late, in any order, and their target is overwritten with rubbish as soon as they are asked for.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <ucontext.h>
#include <vector>
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
#define __device__ static
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct Three { u32 x, y, z; };
extern Three threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;
struct alignas(64) TensorMap { u64 opaque[16]; }; // base, words of a row, rows, bytes between rows, box rows, swizzled
extern unsigned char shared[];
namespace emu {
void yield();
void meet_warp();
void meet_block();
struct Lane { u32 a[4], b[2], c[4], value; };
Lane *lanes(); // of this warp
std::vector<std::pair<int, std::function<void()>>> &late();
struct Barrier { int arrivals = 0, pending = 0; long long bytes = 0; int phase = 0; };
Barrier &barrier(u32 at);
inline void settle(Barrier &b) {
    if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.arrivals;
}
std::mt19937 &random();
extern bool broken;
inline void fail(const char *why) { fprintf(stderr, "emulation: %s\n", why); broken = true; while (true) yield(); }
}
static inline u32 shared_address(const void *p) { return static_cast<u32>(static_cast<const unsigned char *>(p) - shared); }
static inline void barrier_init(u32 at, u32 arrivals) { auto &b = emu::barrier(at); b = {}; b.arrivals = b.pending = arrivals; }
static inline void barriers_ready() {}
static inline void arrive(u32 at) { auto &b = emu::barrier(at); if (--b.pending < 0) emu::fail("too many arrivals"); emu::settle(b); }
static inline void arrive_expecting(u32 at, u32 bytes) { auto &b = emu::barrier(at); b.bytes += bytes; if (--b.pending < 0) emu::fail("too many arrivals"); emu::settle(b); }
static inline void wait(u32 at, u32 parity) { auto &b = emu::barrier(at); while (static_cast<u32>(b.phase) == parity) emu::yield(); }
// a phase flag of 0 stands for "phase 0 is running": its end makes it 1, and parity 0 may go on
// planes of rows of words; what lies outside is 0
static inline void load_box(u32 target, const TensorMap &map, u32 barrier, int x, int y, int z) {
    const u64 *m = map.opaque; // base; words, rows, planes; bytes between rows, between planes; rows and planes of a box
    const int rows = static_cast<int>(m[6]), planes = static_cast<int>(m[7]), words = 32;
    std::vector<u32> got(planes * rows * words, 0);
    for (int p = 0; p < planes; ++p)
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < words; ++c)
                if (x + c < static_cast<int>(m[1]) && y + r < static_cast<int>(m[2]) && z + p < static_cast<int>(m[3]))
                    memcpy(&got[(p * rows + r) * words + c],
                           reinterpret_cast<const char *>(m[0]) + (y + r) * m[4] + (z + p) * m[5] + (x + c) * 4, 4);
    const u32 bytes = planes * rows * 128;
    if (target % 1024) emu::fail("a swizzled box at an address that is no multiple of 1,024");
    memset(shared + target, 0xCC, bytes);
    emu::late().push_back({0, [=] {
        for (u32 i = 0; i < bytes / 4; ++i) {
            u32 at = target + i * 4;
            at ^= (at >> 7 & 7) << 4;
            memcpy(shared + at, &got[i], 4);
        }
        auto &b = emu::barrier(barrier); b.bytes -= bytes; emu::settle(b); }});
}
static inline void load_box(u32 target, const TensorMap &map, u32 barrier, int x, int y) { load_box(target, map, barrier, x, y, 0); }
static inline void load_bytes(u32 target, const void *from, u32 bytes, u32 barrier) {
    if (target % 16 || reinterpret_cast<u64>(from) % 16 || bytes % 16) emu::fail("a bulk copy that is not of 16 bytes");
    memset(shared + target, 0xCC, bytes);
    emu::late().push_back({0, [=] { memcpy(shared + target, from, bytes); auto &b = emu::barrier(barrier); b.bytes -= bytes; emu::settle(b); }});
}
static inline void after_those_in_front() {}
static inline void let_next_in() {}
static inline void __syncwarp() { emu::meet_warp(); }
static inline void __syncthreads() { emu::meet_block(); }
static inline void __threadfence_block() {}
static inline u32 atomicInc(u32 *at, u32 most) { u32 old = *at; *at = old >= most ? 0 : old + 1; return old; }
template <class T> static inline T exchanged(T mine, int from) {
    static_assert(sizeof(T) == 4, "");
    emu::Lane *l = emu::lanes();
    memcpy(&l[threadIdx.x % 32].value, &mine, 4);
    emu::meet_warp();
    T got; memcpy(&got, &l[from].value, 4);
    emu::meet_warp();
    return got;
}
template <class T> static inline T __shfl_xor_sync(u32, T v, int by) { return exchanged(v, threadIdx.x % 32 ^ by); }
template <class T> static inline T __shfl_sync(u32, T v, int from) { return exchanged(v, from % 32); }
template <class T> static inline T __shfl_down_sync(u32, T v, int by) { int l = threadIdx.x % 32; return exchanged(v, l + by < 32 ? l + by : l); }
static inline u32 __reduce_max_sync(u32, u32 v) { for (int by = 16; by; by /= 2) v = std::max(v, __shfl_xor_sync(~0u, v, by)); return v; }
static inline u32 __byte_perm(u32 a, u32 b, u32 s) {
    u64 both = static_cast<u64>(b) << 32 | a; u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= static_cast<u32>(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
static inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; ++i) c += int8_t(a >> 8 * i) * int8_t(b >> 8 * i); return c; }
static inline float __uint_as_float(u32 b) { float f; memcpy(&f, &b, 4); return f; }
static inline u32 __float_as_uint(float f) { u32 b; memcpy(&b, &f, 4); return b; }
static inline int __float2int_rn(float f) { if (!(std::fabs(f) < 2147483648.0f)) return 0x7FFFFFFF; return static_cast<int>(std::nearbyint(f)); }
#define __expf(x) std::exp(x)
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float widened(u16 h) { _Float16 x; memcpy(&x, &h, 2); return static_cast<float>(x); }
#if WIDE
typedef float Grid;
#else
typedef u16 Grid;
#endif
static inline float grid_value(float x) { return x; }
static inline float grid_value(u16 bits) { return widened(bits); }
static inline float value(u16 bits) {
#ifdef HALF
    return widened(bits);
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}
static inline u16 rounded(float f) {
#ifdef HALF
    _Float16 h = static_cast<_Float16>(f); u16 b; memcpy(&b, &h, 2); return b;
#else
    u32 b = __float_as_uint(f); if ((b & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF; return static_cast<u16>((b + 0x7FFF + (b >> 16 & 1)) >> 16);
#endif
}
static inline u32 rounded_pair(float a, float b) { return static_cast<u32>(rounded(b)) << 16 | rounded(a); }
static inline float gated(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }
#ifdef FLOAT
typedef float Out;
static inline float out_value(float x) { return x; }
static inline float as_out(float x) { return x; }
#else
typedef u16 Out;
static inline float out_value(u16 bits) { return value(bits); }
static inline u16 as_out(float wide) { return rounded(wide); }
#endif
static inline void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emu::Lane *l = emu::lanes();
    const int t = threadIdx.x % 32, group = t / 4, place = t % 4;
    l[t].a[0] = a0, l[t].a[1] = a1, l[t].a[2] = a2, l[t].a[3] = a3, l[t].b[0] = b0, l[t].b[1] = b1;
    const int was[4] = {d[0], d[1], d[2], d[3]};
    emu::meet_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = group + (i >= 2 ? 8 : 0), column = place * 2 + i % 2;
        int sum = was[i];
        for (int k = 0; k < 32; ++k) { // a0: rows 0–7, k 0–15; a1: rows 8–15; a2, a3: k 16–31
            const u32 a = l[row % 8 * 4 + k % 16 / 4].a[(k / 16) * 2 + row / 8] >> 8 * (k % 4);
            const u32 b = l[column * 4 + k % 16 / 4].b[k / 16] >> 8 * (k % 4);
            sum += (BITS == 4 ? static_cast<int>(static_cast<uint8_t>(a)) : static_cast<int>(static_cast<int8_t>(a))) * static_cast<int8_t>(b);
        }
        d[i] = sum;
    }
    emu::meet_warp();
}
static inline u32 counted(u32 *at, u32 most) { return atomicInc(at, most); }
static inline void acquire() {}
static inline void remembered(u32 &) {}
static inline void prefetch_map(const TensorMap &) {}
static inline void prefetch(const void *) {}
#define __ldg(p) (*(p))
