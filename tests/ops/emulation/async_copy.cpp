// mbarriers, TMA and the kernel in front: a thread that does not wait for them reads garbage, and
// one that starts a copy too early overwrites what others read.
#include "random_delay.h"
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace emu {
namespace {
struct Barrier {
    int arrivals, pending;
    long long bytes;
    unsigned phase;  // the parity of the one that is running
};

// As launch.tensor_map is replaced: elements' bytes, sizes and box from the innermost dimension
// outwards.
struct Map {
    std::uint64_t address, bytes, swizzled, sizes[4], strides[3], box[4];
};

std::map<std::pair<unsigned, unsigned>, Barrier> barriers;  // by the block's rank and the address
std::vector<std::function<void()>> under_way;
std::vector<std::pair<Stretch, std::vector<unsigned char>>> front;  // what it leaves where
bool front_runs;

Barrier& known(unsigned address) {
    const unsigned whose = address >> 24 ? (address >> 24) - 1 : rank();
    const auto found = barriers.find({whose, address & 0xFFFFFF});
    if (found == barriers.end()) fail("a barrier that nobody has made");
    return found->second;
}

void settle(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0)
        barrier.phase ^= 1, barrier.pending = barrier.arrivals;
}

void land(Barrier& barrier, unsigned bytes) {
    barrier.bytes -= bytes;
    settle(barrier);
}

// A box of a tensor: its rows, one below the other, are ``width`` bytes each.
struct Box {
    Map map;
    std::array<long long, 4> corner = {};
    unsigned dimensions;
    std::uint64_t rows = 1, width;

    Box(const void* tensor_map, const int* at, unsigned dimensions) : dimensions(dimensions) {
        std::memcpy(&map, tensor_map, sizeof map);
        for (unsigned d = 0; d < dimensions; ++d) corner[d] = at[d];
        for (unsigned d = 1; d < dimensions; ++d) rows *= map.box[d];
        width = map.box[0] * map.bytes;
    }

    // In shared memory; whether it may be there.
    void fits(unsigned target) const {
        if (map.swizzled && width != 128) fail("a swizzled box whose rows are not of 128 bytes");
        if (target % (map.swizzled ? 1024 : 128))
            fail("a box at an address that is no multiple of 128, swizzled of 1,024");
        at(static_cast<unsigned>(target + rows * width - 1));
    }

    std::uint64_t place(unsigned target, std::uint64_t row, std::uint64_t byte) const {
        const std::uint64_t straight = target + row * width + byte;
        return map.swizzled ? straight ^ (straight >> 7 & 7) << 4 : straight;
    }

    // In the tensor: null for what lies outside.
    unsigned char* element(std::uint64_t row, std::uint64_t i) const {
        auto* from = reinterpret_cast<unsigned char*>(map.address);
        const long long column = corner[0] + static_cast<long long>(i);
        if (column < 0 || column >= static_cast<long long>(map.sizes[0])) return nullptr;
        for (unsigned d = 1; d < dimensions; ++d) {
            const long long place = corner[d] + static_cast<long long>(row % map.box[d]);
            row /= map.box[d];
            if (place < 0 || place >= static_cast<long long>(map.sizes[d])) return nullptr;
            from += place * static_cast<long long>(map.strides[d - 1]);
        }
        return from + column * static_cast<long long>(map.bytes);
    }
};

// Of a thread: stores that have not ended, group by group; the last group is open.
std::map<unsigned, std::deque<std::vector<std::shared_ptr<bool>>>> stores;

std::deque<std::vector<std::shared_ptr<bool>>>& stores_of_thread() {
    auto& mine = stores[thread_in_cluster()];
    if (mine.empty()) mine.emplace_back();
    return mine;
}
}  // namespace

void barrier_init(unsigned address, unsigned arrivals) {
    barriers[{rank(), address}] = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};
}

void arrive(unsigned address, unsigned bytes) {
    Barrier& barrier = known(address);
    barrier.bytes += bytes;
    if (--barrier.pending < 0) fail("more arrivals at a barrier than it waits for");
    settle(barrier);
}

bool ended(unsigned address, unsigned parity) {
    const bool done = known(address).phase != parity;
    if (!done) yield();
    return done;
}

void load_box(unsigned target, const void* tensor_map, const int* corner, unsigned dimensions,
              unsigned address) {
    const Box box(tensor_map, corner, dimensions);
    box.fits(target);
    unsigned char* const memory = at(target) - target;
    std::memset(memory + target, 0xFF, box.rows * box.width);
    Barrier& barrier = known(address);
    under_way.push_back([=, &barrier] {
        for (std::uint64_t row = 0; row < box.rows; ++row) {
            for (std::uint64_t i = 0; i < box.map.box[0]; ++i) {
                const unsigned char* const from = box.element(row, i);
                unsigned char* const to = memory + box.place(target, row, i * box.map.bytes);
                from ? std::memcpy(to, from, box.map.bytes) : std::memset(to, 0, box.map.bytes);
            }
        }
        land(barrier, static_cast<unsigned>(box.rows * box.width));
    });
}

void store_box(const void* tensor_map, const int* corner, unsigned dimensions, unsigned source) {
    const Box box(tensor_map, corner, dimensions);
    box.fits(source);
    const unsigned char* const memory = at(source) - source;
    const auto done = std::make_shared<bool>(false);
    stores_of_thread().back().push_back(done);
    under_way.push_back([=] {
        for (std::uint64_t row = 0; row < box.rows; ++row) {
            for (std::uint64_t i = 0; i < box.map.box[0]; ++i) {
                unsigned char* const to = box.element(row, i);
                if (to)
                    std::memcpy(to, memory + box.place(source, row, i * box.map.bytes),
                                box.map.bytes);
            }
        }
        *done = true;
    });
}

void stores_commit() { stores_of_thread().emplace_back(); }

void stores_wait(unsigned left) {
    auto& mine = stores_of_thread();
    for (; mine.size() > left + 1; mine.pop_front()) {
        for (const auto& done : mine.front()) {
            while (!*done) yield();
        }
    }
}

void load_bytes(unsigned target, Address from, unsigned bytes, unsigned address) {
    if (target % 16 || from % 16 || bytes % 16)
        fail("a copy that is not of 16 bytes, or not at an address of 16");
    unsigned char* const to = at(target);
    std::memset(to, 0xFF, bytes);
    Barrier& barrier = known(address);
    under_way.push_back([=, &barrier] {
        std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
        land(barrier, bytes);
    });
}

void store_words(unsigned target, const unsigned* words, std::size_t count, unsigned address) {
    const std::vector<unsigned> kept(words, words + count);
    unsigned char* const to = at(target);
    std::memset(to, 0xFF, 4 * count);
    Barrier& barrier = known(address);
    under_way.push_back([=, &barrier] {
        std::memcpy(to, kept.data(), 4 * count);
        land(barrier, static_cast<unsigned>(4 * count));
    });
}

bool some_copies_land() {
    if (generator() % 48) return false;
    bool any = false;
    // of hundreds, as of small stores to other blocks, more at once
    for (auto left = 1 + generator() % (4 + under_way.size() / 8); left > 0 && !under_way.empty();
         --left, any = true) {
        const auto which = static_cast<std::ptrdiff_t>(generator() % under_way.size());
        under_way[static_cast<std::size_t>(which)]();
        under_way.erase(under_way.begin() + which);
    }
    return any;
}

bool copies_left() { return !under_way.empty(); }

void front_begins(const Stretch* stretches, unsigned count) {
    front.clear();
    for (unsigned i = 0; i < count; ++i) {
        auto* const place = reinterpret_cast<unsigned char*>(stretches[i].at);
        front.push_back({stretches[i], {place, place + stretches[i].bytes}});
        std::memset(place, 0xFF, stretches[i].bytes);
    }
    front_runs = true;
    under_way.push_back(front_ends);
}

void front_ends() {
    for (const auto& [to, left] : front)
        std::memcpy(reinterpret_cast<void*>(to.at), left.data(), left.size());
    front.clear(), front_runs = false;
}

void wait_for_front() {
    while (front_runs) yield();
}

void forget_copies() { under_way.clear(), barriers.clear(), stores.clear(); }
}  // namespace emu
