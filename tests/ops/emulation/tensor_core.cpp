// What the tensor cores do, by who holds what (mma.cuh, wgmma.cuh), and how 16- and 8-bit floats
// are made.
#include "random_delay.h"
#include <cmath>
#include <deque>
#include <map>
#include <string>
#include <vector>

namespace emu {
namespace {
float from_bits(std::uint32_t bits) {
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// "row.col.D.A.B.C" at the end of an instruction's name, or "D.A.B": the word with this number
// behind ``mark``.
How type_of(How how, How mark, int number) {
    How rest = how.substr(how.find(mark) + mark.size());
    for (; number > 0; --number) rest = rest.substr(rest.find('.') + 1);
    return rest.substr(0, rest.find('.'));
}

int byte_of(How type, std::uint32_t word, int place) {
    const auto byte = static_cast<std::uint8_t>(word >> 8 * place);
    return type == "u8" ? byte : static_cast<std::int8_t>(byte);
}

// d[i] of lane l is row l / 4 (+ 8), column 2 (l % 4) + i % 2; a word has ``each`` values along K,
// a quad 4 words.
template <int EACH, typename Number, typename Sum, typename ValueA, typename ValueB>
void multiply_warp(Number* const* d, const Words& mine, ValueA value_a, ValueB value_b) {
    const Words* all = shown(mine);
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        Sum sum = *d[i];
        for (int k = 0; k < 8 * EACH; ++k) {
            const int place = k % (4 * EACH) / EACH, half = k / (4 * EACH);
            const auto a = all[row % 8 * 4 + place].word[half * 2 + row / 8];
            const auto b = all[column * 4 + place].word[4 + half];
            sum += static_cast<Sum>(value_a(a, k % EACH)) * static_cast<Sum>(value_b(b, k % EACH));
        }
        *d[i] = static_cast<Number>(sum);
    }
}

// A product of a warpgroup, which all of its threads issue; d[t], a[t]: what thread t has. a_there:
// a descriptor, where A lies in shared memory.
struct GroupProduct {
    How how;
    unsigned arrived = 0;
    bool done = false, add[128], in_memory = false;
    std::vector<float*> d[128];
    std::uint32_t a[128][4];
    Address a_there, b;
    unsigned rank;
};

struct Thread {
    std::size_t issued = 0;
    std::vector<std::size_t> groups;  // products issued before each end of a group
};

std::map<unsigned, std::deque<GroupProduct>> products;  // of each warpgroup
std::map<unsigned, Thread> threads;

// A matrix as a descriptor names it, its rows swizzled: 8 of 128 bytes side by side. 16 values of
// each of its rows.
std::vector<float> rows_of(Address matrix, How type, unsigned rank, unsigned rows) {
    const auto field = [&](int by) { return static_cast<unsigned>(matrix >> by & 0x3FFF) << 4; };
    const unsigned char* const memory = memory_of(rank);
    std::vector<float> found;
    for (unsigned row = 0; row < rows; ++row) {
        for (unsigned k = 0; k < 16; ++k) {
            unsigned place = field(0) + row / 8 * field(32) + row % 8 * 128 + k * 2;
            place ^= (place >> 7 & 7) << 4;
            std::uint16_t bits;
            std::memcpy(&bits, memory + place, 2);
            found.push_back(number(type, bits));
        }
    }
    return found;
}

// A's 64 rows of 16 from the registers that hold them.
std::vector<float> rows_held(const GroupProduct& product, How type) {
    std::vector<float> found(64 * 16);
    for (unsigned thread = 0; thread < 128; ++thread) {
        for (unsigned i = 0; i < 8; ++i) {  // words 0, 2: the upper row; 2, 3: 8 columns further
            const unsigned word = i / 2, row = thread / 32 * 16 + thread % 32 / 4 + word % 2 * 8;
            const unsigned column = word / 2 * 8 + thread % 4 * 2 + i % 2;
            found[row * 16 + column] =
                number(type, static_cast<std::uint16_t>(product.a[thread][word] >> 16 * (i % 2)));
        }
    }
    return found;
}

void finish(GroupProduct& product) {
    const auto columns = static_cast<unsigned>(product.d[0].size()) * 2;
    const How type = type_of(product.how, "k16.", 1);
    const auto b = rows_of(product.b, type_of(product.how, "k16.", 2), product.rank, columns);
    const auto a = product.in_memory ? rows_of(product.a_there, type, product.rank, 64)
                                     : rows_held(product, type);
    for (unsigned thread = 0; thread < 128; ++thread) {
        for (unsigned i = 0; i < columns / 2; ++i) {
            const unsigned row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
            const float *left = &a[row * 16],
                        *right = &b[(i / 4 * 8 + thread % 4 * 2 + i % 2) * 16];
            float& to = *product.d[thread][i];
            double sum = product.add[thread] ? to : 0.0;
            for (int k = 0; k < 16; ++k) sum += static_cast<double>(left[k]) * right[k];
            to = static_cast<float>(sum);
        }
    }
    product.done = true;
}

// The next product of this thread's warpgroup, and this thread's place in it.
GroupProduct& issued(How how, float* const* d, Address b, bool add) {
    const unsigned thread = thread_in_cluster();
    const std::size_t number = threads[thread].issued++;
    auto& all = products[rank() * 16 + threadIdx.x / 128];
    if (all.size() <= number) all.resize(number + 1);
    GroupProduct& product = all[number];
    const unsigned mine = threadIdx.x % 128;
    const auto columns =
        static_cast<unsigned>(std::stoi(std::string(how.substr(how.find("m64n") + 4))));
    product.how = how, product.b = b, product.rank = rank(), product.add[mine] = add;
    product.d[mine].assign(d, d + columns / 2);
    ++product.arrived;
    return product;
}
}  // namespace

void multiply(How how, float* const* d, const Words& mine) {
    const How a = type_of(how, "row.col.", 1), b = type_of(how, "row.col.", 2);
    const auto of = [](How type) {
        return [type](std::uint32_t word, int at) {
            return number(type, static_cast<std::uint16_t>(word >> 16 * at));
        };
    };
    multiply_warp<2, float, double>(d, mine, of(a), of(b));
}

void multiply(How how, int* const* d, const Words& mine) {
    const How a = type_of(how, "row.col.", 1), b = type_of(how, "row.col.", 2);
    const auto of = [](How type) {
        return [type](std::uint32_t word, int at) { return byte_of(type, word, at); };
    };
    multiply_warp<4, int, int>(d, mine, of(a), of(b));
}

void group_product(How how, float* const* d, const unsigned* a, Address b, bool add) {
    auto& held = issued(how, d, b, add).a[threadIdx.x % 128];
    std::memcpy(held, a, sizeof held);
}

void group_product(How how, float* const* d, Address a, Address b, bool add) {
    GroupProduct& product = issued(how, d, b, add);
    product.a_there = a, product.in_memory = true;
}

void group_commit() {
    Thread& thread = threads[thread_in_cluster()];
    thread.groups.push_back(thread.issued);
}

void group_wait(unsigned left) {
    const Thread& thread = threads[thread_in_cluster()];
    if (thread.groups.size() <= left) return;
    const std::size_t end = thread.groups[thread.groups.size() - 1 - left];
    const unsigned group = rank() * 16 + threadIdx.x / 128;
    for (std::size_t i = 0; i < end; ++i) {
        while (products[group][i].arrived < 128) yield();
        if (!products[group][i].done) finish(products[group][i]);
    }
}

void forget_products() { products.clear(), threads.clear(); }

float half(std::uint16_t bits) {
    _Float16 narrow;
    std::memcpy(&narrow, &bits, 2);
    return static_cast<float>(narrow);
}

float brief(std::uint16_t bits) { return from_bits(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t to_half(float wide) {
    const _Float16 narrow = static_cast<_Float16>(wide);
    std::uint16_t bits;
    std::memcpy(&bits, &narrow, 2);
    return bits;
}

std::uint16_t to_brief(float wide) {
    std::uint32_t bits;
    std::memcpy(&bits, &wide, 4);
    if (std::isnan(wide)) return 0x7FFF;
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // half to even
}

std::uint8_t to_e4m3(float wide) {
    const std::uint8_t sign = std::signbit(wide) ? 0x80 : 0;
    if (std::isnan(wide)) return 0x7F;
    const float size = std::fabs(wide);
    if (size >= 448.0f) return sign | 0x7E;
    // below 2^-6 steps are as above it
    const int exponent = std::max(size > 0.0f ? std::ilogb(size) : -6, -6);
    const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
    return static_cast<std::uint8_t>(sign | (((exponent + 6) << 3) + steps));
}
}  // namespace emu
