// The GPU's instructions that kernels name, as translate.py calls them: the name's first word is
// the function's, the others are text, and the operands come in their order.
#pragma once
#include "device.h"

namespace emu {
template <typename T> inline Address bits(T* pointer) { return reinterpret_cast<Address>(pointer); }
inline Address bits(unsigned long long value) { return value; }
}  // namespace emu

namespace ptx {
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// ---- What only orders memory or hints: here all is in order and seen at once. Launching early.
template <typename... Any> inline void fence(How, Any...) {}
template <typename... Any> inline void prefetch(How, Any...) {}
template <typename... Any> inline void setmaxnreg(How, Any...) {}
inline void griddepcontrol(How how) {
    if (emu::says(how, "wait")) emu::wait_for_front();
}

// ---- Numbers.
inline void cvt(How, float& to, u16 half) { to = emu::half(half); }
inline void cvt(How how, u16& to, float wide) { to = emu::rounded(how, wide); }
inline void cvt(How how, u32& to, float upper, float lower) {
    to = static_cast<u32>(emu::rounded(how, upper)) << 16 | emu::rounded(how, lower);
}
inline void cvt(How, u16& to, float upper, float lower) {
    to = static_cast<u16>(emu::to_e4m3(upper) << 8 | emu::to_e4m3(lower));
}
inline float flushed(float x) {
    return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x;
}
inline void ex2(How, float& to, float x) { to = flushed(std::exp2(flushed(x))); }
inline void lg2(How, float& to, float x) { to = std::log2(flushed(x)); }
inline void rcp(How, float& to, float x) { to = flushed(1.0f / flushed(x)); }
template <typename Of> inline u32 of_halves(How how, u32 a, u32 b, Of of) {
    const auto half = [&](u32 pair, int by) {
        return emu::number(how, static_cast<u16>(pair >> by));
    };
    const auto one = [&](int by) -> u32 { return emu::rounded(how, of(half(a, by), half(b, by))); };
    return one(0) | one(16) << 16;
}
inline void mul(How how, u32& to, u32 a, u32 b) {
    to = of_halves(how, a, b, [](float x, float y) { return x * y; });
}
inline void sub(How how, u32& to, u32 a, u32 b) {
    to = of_halves(how, a, b, [](float x, float y) { return x - y; });
}
inline void mov(How, u32& to, u32 from) { to = from; }
inline void mov(How, std::array<u16*, 2> to, u32 from) {
    *to[0] = from & 0xFFFF, *to[1] = from >> 16;
}
inline void setp(How, bool& to, u32 a, u32 b) { to = a != b; }
inline void lop3(How, u32& to, u32 a, u32 b, u32 c, u32 table) {
    to = 0;
    for (int bit = 0; bit < 32; ++bit) {
        const u32 which = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1);
        to |= (table >> which & 1) << bit;
    }
}

// ---- Memory.
inline void mapa(How, u32& to, u32 address, u32 rank) { to = address | (rank + 1) << 24; }
template <typename T, std::size_t COUNT>
inline void ld(How, std::array<T*, COUNT> to, u32 address) {
    if (address % sizeof(T[COUNT])) emu::fail("a load that is not aligned");
    for (std::size_t i = 0; i < COUNT; ++i)
        std::memcpy(to[i], emu::at(address) + i * sizeof(T), sizeof(T));
}
template <typename T, std::size_t COUNT>
inline void ld(How, std::array<T*, COUNT> to, u64 address) {
    if (address % sizeof(T[COUNT])) emu::fail("a load that is not aligned");
    for (std::size_t i = 0; i < COUNT; ++i) *to[i] = reinterpret_cast<const T*>(address)[i];
}
template <typename T, typename Place> inline void ld(How how, T& to, Place address) {
    ld(how, std::array<T*, 1>{&to}, address);
}
inline void st(How, u32 address, u32 word) {
    if (address % 4) emu::fail("a store that is not aligned");
    std::memcpy(emu::at(address), &word, 4);
}
inline void st(How, u32 address, u32 word, u32 barrier) {  // async
    if (address % 4) emu::fail("a store that is not aligned");
    emu::store_words(address, &word, 1, barrier);
}
template <std::size_t COUNT>
inline void st(How, u32 address, std::array<u32, COUNT> words, u32 barrier) {  // async
    if (address % sizeof words) emu::fail("a store that is not aligned");
    emu::store_words(address, words.data(), COUNT, barrier);
}
inline void atom(How, u32& before, u32 address, u32 most) {  // inc
    std::memcpy(&before, emu::at(address), 4);
    const u32 next = before >= most ? 0 : before + 1;
    std::memcpy(emu::at(address), &next, 4);
}

// ---- Barriers.
inline void bar(How how, u32 id, u32 threads) {
    emu::says(how, "sync") ? emu::meet(id, threads) : emu::pass(id, threads);
}
inline u32 cluster_ctarank() { return emu::rank(); }
inline void barrier(How how) {
    emu::says(how, "arrive") ? emu::cluster_arrive() : emu::cluster_wait();
}
inline void mbarrier(How, u32 address) { emu::arrive(address, 0); }
inline void mbarrier(How how, u32 address, u32 number) {
    emu::says(how, "init") ? emu::barrier_init(address, number) : emu::arrive(address, number);
}
inline void mbarrier(How, bool& done, u32 address, u32 parity) {
    done = emu::ended(address, parity);
}

// ---- TMA: boxes, to one block or to several; bytes side by side; bytes to the L2
// cache; boxes that are stored, and groups of them.
template <std::size_t DIMENSIONS>
inline std::array<int, DIMENSIONS> corner_of(std::array<u32, DIMENSIONS> coordinates) {
    std::array<int, DIMENSIONS> corner;
    for (std::size_t i = 0; i < DIMENSIONS; ++i) corner[i] = static_cast<int>(coordinates[i]);
    return corner;
}
template <std::size_t DIMENSIONS>
inline void cp(How, u32 target, u64 map, std::array<u32, DIMENSIONS> corner, u32 barrier) {
    emu::load_box(target, reinterpret_cast<const void*>(map), corner_of(corner).data(), DIMENSIONS,
                  barrier);
}
template <std::size_t DIMENSIONS>
inline void cp(How how, u32 target, u64 map, std::array<u32, DIMENSIONS> corner, u32 barrier,
               u16 blocks) {
    for (u32 rank = 0; rank < 16; ++rank) {
        const u32 there = (rank + 1) << 24;
        if (blocks >> rank & 1) cp(how, target | there, map, corner, barrier | there);
    }
}
template <std::size_t DIMENSIONS>
inline void cp(How, u64 map, std::array<u32, DIMENSIONS> corner, u32 source) {
    emu::store_box(reinterpret_cast<const void*>(map), corner_of(corner).data(), DIMENSIONS,
                   source);
}
inline void cp(How) { emu::stores_commit(); }
inline void cp(How, int left) { emu::stores_wait(static_cast<unsigned>(left)); }
inline void cp(How, u32 target, u64 from, u32 bytes, u32 barrier) {
    emu::load_bytes(target, from, bytes, barrier);
}
inline void cp(How, u64 from, u32 bytes) {
    if (from % 16 || bytes % 16) emu::fail("bytes to the L2 cache that are not of 16");
    // it may be read
    static_cast<void>(*reinterpret_cast<const volatile char*>(from + bytes - 1));
}
template <typename... Others> inline void cp(How, Others...) {
    emu::fail("a copy that is not emulated");
}

// ---- Products.
inline void movmatrix(How, u32& to, u32 mine) {
    const emu::Words* all = emu::shown({{mine}});
    const u32 row = threadIdx.x % 4 * 2, column = threadIdx.x % 32 / 4;
    const auto value = [&](u32 from) {
        return all[from * 4 + column / 2].word[0] >> 16 * (column % 2) & 0xFFFF;
    };
    to = value(row) | value(row + 1) << 16;
}
template <typename Sum>
inline void mma(How how, std::array<Sum*, 4> d, std::array<u32, 4> a, std::array<u32, 2> b,
                std::array<Sum, 4>) {
    emu::multiply(how, d.data(), {{a[0], a[1], a[2], a[3], b[0], b[1]}});
}
inline void wgmma(How how) {
    if (emu::says(how, "commit_group")) emu::group_commit();
}
inline void wgmma(How, int left) { emu::group_wait(left); }
template <std::size_t COUNT, typename Add>
inline void wgmma(How how, std::array<float*, COUNT> d, std::array<u32, 4> a, u64 b, Add add, int,
                  int, int across) {
    if (across) emu::fail("a right operand along columns is not emulated");
    emu::group_product(how, d.data(), a.data(), b, add);
}
template <std::size_t COUNT, typename Add>
inline void wgmma(How how, std::array<float*, COUNT> d, u64 a, u64 b, Add add, int, int, int down,
                  int across) {
    if (down || across) emu::fail("an operand along columns is not emulated");
    emu::group_product(how, d.data(), a, b, add);
}
template <typename... Others> inline void wgmma(How, Others...) {
    emu::fail("a product that is not emulated");
}
}  // namespace ptx
