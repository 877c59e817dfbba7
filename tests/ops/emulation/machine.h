// Blocks of CUDA threads on the CPU: each thread is a fiber, and whatever waits for others gives
// way. The blocks of a cluster run together, one cluster after another. machine.cpp runs them,
// async_copy.cpp has the barriers and TMA, tensor_core.cpp the tensor cores.
//
// An address in shared memory is an offset in the block's own; with a rank in the cluster, plus
// one, in the upper byte, in that block's.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>

typedef std::string_view How;  // what an instruction's name says behind its first word

struct Three {
    unsigned x, y, z;
};
extern Three threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
typedef unsigned long long Address;
// bytes of a block's shared memory: variables have names
constexpr unsigned DYNAMIC = 228 << 10, NAMED = 64 << 10;

inline bool says(How how, How part) { return how.find(part) != How::npos; }

// The launch ends, for this reason, and this thread never goes on.
[[noreturn]] void fail(const char* why);
void yield();

// ---- Shared memory, all ones (no number, in any type of floats) before the kernel writes it.
unsigned char* dynamic();
// the variable with this number: at the same place in all blocks
void* named(int id, unsigned bytes);
template <typename T, int ID> T& in_block() { return *static_cast<T*>(named(ID, sizeof(T))); }
unsigned offset_of(const void* pointer);
unsigned char* at(unsigned address);
unsigned rank();

// ---- Meetings.
void meet(unsigned id, unsigned threads);
void pass(unsigned id, unsigned threads);  // counts, does not wait
void cluster_arrive();
void cluster_wait();
struct Words {
    unsigned word[6];
};
const Words* shown(const Words& mine);  // all 32 lanes' words, until the warp's next but one

// ---- Barriers and TMA. Copies arrive late and in any order, and their target is
// rubbish from the moment that they are asked for.
void barrier_init(unsigned barrier, unsigned arrivals);
void arrive(unsigned barrier, unsigned bytes);
bool ended(unsigned barrier, unsigned parity);
void load_box(unsigned target, const void* map, const int* corner, unsigned dimensions,
              unsigned barrier);
void load_bytes(unsigned target, Address from, unsigned bytes, unsigned barrier);
// of a thread's registers
void store_words(unsigned target, const unsigned* words, std::size_t count, unsigned barrier);

// Stores of boxes read what they write as late as they may: until their thread waits for their
// group.
void store_box(const void* map, const int* corner, unsigned dimensions, unsigned source);
void stores_commit();
void stores_wait(unsigned left);

// ---- The kernel in front, which ends at some time. What it reads and writes is rubbish before,
// and what others write there before is lost.
struct Stretch {
    Address at, bytes;
};
void wait_for_front();

// ---- Products. Those of a warpgroup read and write when somebody waits for them, as late as they
// may.
void multiply(How how, float* const* d, const Words& mine);
void multiply(How how, int* const* d, const Words& mine);
void group_product(How how, float* const* d, const unsigned* a, Address b, bool add);
void group_product(How how, float* const* d, Address a, Address b, bool add);
void group_commit();
void group_wait(unsigned left);

// ---- Numbers.
float half(std::uint16_t bits);
float brief(std::uint16_t bits);  // bfloat16
std::uint16_t to_half(float wide);
std::uint16_t to_brief(float wide);
std::uint8_t to_e4m3(float wide);  // held at its ends
inline float number(How type, std::uint16_t bits) {
    return says(type, "bf16") ? brief(bits) : half(bits);
}
inline std::uint16_t rounded(How type, float wide) {
    return says(type, "bf16") ? to_brief(wide) : to_half(wide);
}

// ---- A launch.
struct Grid {
    unsigned blocks, threads, cluster, shared, seed;
    const Stretch* front;
    unsigned stretches;
};
const char* run(const Grid& grid, void (*body)(const void*), const void* parameters);

// Parameters are read as the driver reads them: one pointer each. Returns why it failed, or null.
template <typename... Parameters>
const char* launch(void (*kernel)(Parameters...), const Grid& grid, const void* const* pointers) {
    struct Call {
        void (*kernel)(Parameters...);
        std::tuple<std::remove_const_t<Parameters>...> parameters;
    };
    Call call = {kernel, {}};
    int next = 0;
    std::apply([&](auto&... each) { (std::memcpy(&each, pointers[next++], sizeof each), ...); },
               call.parameters);
    const auto body = [](const void* from) {
        const Call& call = *static_cast<const Call*>(from);
        std::apply(call.kernel, call.parameters);
    };
    return run(grid, body, &call);
}
}  // namespace emu

// What a library offers for a kernel with clusters of so many blocks. n: blocks, threads, shared
// bytes, seed, stretches of memory in ``front``.
#define EMULATED(KERNEL, CLUSTER)                                                                  \
    extern "C" const char* emulate_##KERNEL(const unsigned* n, const emu::Stretch* front,          \
                                            const void* const* parameters) {                       \
        return emu::launch(KERNEL, {n[0], n[1], CLUSTER, n[2], n[3], front, n[4]}, parameters);    \
    }
