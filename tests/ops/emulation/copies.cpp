// mbarriers, the copy engine and the kernel in front: who does not wait for them finds rubbish, and who asks for a copy
// too early spoils what is read.
#include "late.h"
#include <functional>
#include <map>
#include <vector>

namespace emu {
namespace {
struct Barrier {
    int arrivals, pending;
    long long bytes;
    unsigned phase; // the parity of the one that is running
};

// As launch.tensor_map is replaced: elements' bytes, sizes and box from the innermost dimension outwards.
struct Map {
    std::uint64_t address, bytes, swizzled, sizes[4], strides[3], box[4];
};

std::map<std::pair<unsigned, unsigned>, Barrier> barriers; // by the block's rank and the address
std::vector<std::function<void()>> under_way;
std::vector<std::pair<Stretch, std::vector<unsigned char>>> front; // what it leaves where
bool front_runs;

Barrier &known(unsigned address) {
    const unsigned whose = address >> 24 ? (address >> 24) - 1 : rank();
    const auto found = barriers.find({whose, address & 0xFFFFFF});
    if (found == barriers.end()) fail("a barrier that nobody has made");
    return found->second;
}

void settle(Barrier &barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.arrivals;
}

void land(Barrier &barrier, unsigned bytes) {
    barrier.bytes -= bytes;
    settle(barrier);
}

// Bytes of a row of the box, x of them along its innermost dimension; what lies outside of the tensor is zero.
void read_row(unsigned char *to, const Map &map, const long long *corner, unsigned dimensions, std::uint64_t row) {
    const auto *from = reinterpret_cast<const unsigned char *>(map.address);
    bool inside = true;
    for (unsigned d = 1; d < dimensions; ++d) {
        const long long place = corner[d] + static_cast<long long>(row % map.box[d]);
        row /= map.box[d];
        inside = inside && place >= 0 && place < static_cast<long long>(map.sizes[d]);
        from += place * static_cast<long long>(map.strides[d - 1]);
    }
    for (std::uint64_t i = 0; i < map.box[0]; ++i) {
        const long long column = corner[0] + static_cast<long long>(i);
        const bool there = inside && column >= 0 && column < static_cast<long long>(map.sizes[0]);
        if (there) std::memcpy(to + i * map.bytes, from + column * static_cast<long long>(map.bytes), map.bytes);
        if (!there) std::memset(to + i * map.bytes, 0, map.bytes);
    }
}
} // namespace

void barrier_init(unsigned address, unsigned arrivals) {
    barriers[{rank(), address}] = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};
}

void arrive(unsigned address, unsigned bytes) {
    Barrier &barrier = known(address);
    barrier.bytes += bytes;
    if (--barrier.pending < 0) fail("more arrivals at a barrier than it waits for");
    settle(barrier);
}

bool ended(unsigned address, unsigned parity) {
    const bool done = known(address).phase != parity;
    if (!done) yield();
    return done;
}

void load_box(unsigned target, const void *told, const int *corner, unsigned dimensions, unsigned address) {
    Map map;
    std::memcpy(&map, told, sizeof map);
    std::uint64_t rows = 1, width = map.box[0] * map.bytes;
    for (unsigned d = 1; d < dimensions; ++d) rows *= map.box[d];
    if (map.swizzled && width != 128) fail("a swizzled box whose rows are not of 128 bytes");
    if (target % (map.swizzled ? 1024 : 128)) fail("a box at an address that is no multiple of 128, swizzled of 1,024");
    unsigned char *const memory = at(target) - target;
    at(static_cast<unsigned>(target + rows * width - 1));
    std::memset(memory + target, 0xFF, rows * width);
    std::array<long long, 4> first = {};
    for (unsigned d = 0; d < dimensions; ++d) first[d] = corner[d];
    Barrier &barrier = known(address);
    under_way.push_back([=, &barrier] {
        std::vector<unsigned char> got(width);
        for (std::uint64_t row = 0; row < rows; ++row) {
            read_row(got.data(), map, first.data(), dimensions, row);
            for (std::uint64_t i = 0; i < width; ++i) {
                std::uint64_t place = target + row * width + i;
                if (map.swizzled) place ^= (place >> 7 & 7) << 4;
                memory[place] = got[i];
            }
        }
        land(barrier, static_cast<unsigned>(rows * width));
    });
}

void load_bytes(unsigned target, Address from, unsigned bytes, unsigned address) {
    if (target % 16 || from % 16 || bytes % 16) fail("a copy that is not of 16 bytes, or not at an address of 16");
    unsigned char *const to = at(target);
    std::memset(to, 0xFF, bytes);
    Barrier &barrier = known(address);
    under_way.push_back([=, &barrier] {
        std::memcpy(to, reinterpret_cast<const void *>(from), bytes);
        land(barrier, bytes);
    });
}

bool some_copies_land() {
    if (generator() % 48) return false;
    bool any = false;
    for (auto left = 1 + generator() % 4; left > 0 && !under_way.empty(); --left, any = true) {
        const auto which = static_cast<std::ptrdiff_t>(generator() % under_way.size());
        under_way[static_cast<std::size_t>(which)]();
        under_way.erase(under_way.begin() + which);
    }
    return any;
}

bool copies_left() { return !under_way.empty(); }

void front_begins(const Stretch *stretches, unsigned count) {
    front.clear();
    for (unsigned i = 0; i < count; ++i) {
        auto *const place = reinterpret_cast<unsigned char *>(stretches[i].at);
        front.push_back({stretches[i], {place, place + stretches[i].bytes}});
        std::memset(place, 0xFF, stretches[i].bytes);
    }
    front_runs = true;
    under_way.push_back(front_ends);
}

void front_ends() {
    for (const auto &[to, left] : front) std::memcpy(reinterpret_cast<void *>(to.at), left.data(), left.size());
    front.clear(), front_runs = false;
}

void wait_for_front() {
    while (front_runs) yield();
}

void forget_copies() { under_way.clear(), barriers.clear(); }
} // namespace emu
