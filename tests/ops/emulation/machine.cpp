// Threads as fibers, their meetings, and who runs when: warps in any order, some of them lagging
// behind, and one block of a cluster far behind the others.
#include "machine.h"
#include "random_delay.h"
#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <ucontext.h>
#include <vector>

Three threadIdx, blockIdx, blockDim, gridDim;

namespace emu {
namespace {
constexpr std::size_t STACK = 128 << 10;
constexpr int LATE = 100;       // rounds in which nobody moves before a late block begins
constexpr int PATIENCE = 4000;  // rounds in which nobody moves: then all wait for one another

struct Meeting {
    unsigned count = 0, turn = 0;
};

struct Warp {
    unsigned count = 0, turn = 0;
    Words words[2][32];
};

struct Block {
    unsigned number, rank, left;  // threads that have not ended
    std::unique_ptr<unsigned char, decltype(&std::free)> memory{nullptr, &std::free};
    std::map<unsigned, Meeting> meetings;
    std::vector<Warp> warps;
};

struct Fiber {
    ucontext_t context;
    Block* block;
    unsigned thread, shown = 0, met = 0;
    bool done = false;
};

ucontext_t home;
std::vector<std::unique_ptr<char[]>> stacks;
std::vector<Block> blocks;
std::vector<Fiber> fibers;
std::map<int, unsigned> places;  // of variables in shared memory
unsigned placed, shared_bytes;
std::vector<unsigned> met;  // threads at each meeting of the cluster
Fiber* current;
const char* reason;
bool moved;
void (*body)(const void*);
const void* kernel_parameters;

void enter() {
    body(kernel_parameters);
    current->done = moved = true;
    Block& block = *current->block;  // nobody may read what was a block's when it has ended
    if (--block.left == 0) std::memset(block.memory.get(), 0xFF, DYNAMIC + NAMED);
    while (true) yield();
}

void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = {fiber.thread, 0, 0}, blockIdx = {fiber.block->number, 0, 0};
    swapcontext(&home, &fiber.context);
}

void start(unsigned first, unsigned cluster, unsigned threads) {
    blocks.clear(), blocks.resize(cluster);
    fibers.clear(), fibers.resize(cluster * threads);
    met.clear(), places.clear(), placed = 0;
    while (stacks.size() < fibers.size()) stacks.emplace_back(new char[STACK]);
    for (unsigned rank = 0; rank < cluster; ++rank) {
        Block& block = blocks[rank];
        block.number = first + rank, block.rank = rank, block.left = threads,
        block.warps.resize(threads / 32);
        block.memory.reset(static_cast<unsigned char*>(std::aligned_alloc(1024, DYNAMIC + NAMED)));
        std::memset(block.memory.get(), 0xFF, DYNAMIC + NAMED);
    }
    for (unsigned i = 0; i < fibers.size(); ++i) {
        Fiber& fiber = fibers[i];
        fiber.block = &blocks[i / threads], fiber.thread = i % threads;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks[i].get(), fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &home;
        makecontext(&fiber.context, enter, 0);
    }
}

const char* run_cluster() {
    std::vector<unsigned> order(fibers.size() / 32);
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    const unsigned slow = blocks.size() > 1 ? generator() % blocks.size() : 1;
    bool late = generator() % 2;  // the slow block has not begun: until the others wait for it
    int idle = 0;
    for (std::size_t left = fibers.size(); left;) {
        moved = false;
        std::shuffle(order.begin(), order.end(), generator);
        for (unsigned warp : order) {
            if (generator() % 4 == 0) continue;
            if (fibers[warp * 32].block->rank == slow && (late || generator() % 8)) continue;
            for (unsigned lane = 0; lane < 32 && !reason; ++lane) {
                Fiber& fiber = fibers[warp * 32 + lane];
                if (fiber.done) continue;
                resume(fiber);
                left -= fiber.done;
            }
        }
        if (some_copies_land()) moved = true;
        idle = moved ? 0 : idle + 1;
        late = late && idle < LATE;
        if (reason) return reason;
        if (idle > PATIENCE) return "all threads wait for one another";
    }
    return copies_left() ? "copies are on their way at the end" : nullptr;
}
}  // namespace

std::mt19937 generator;

void yield() { swapcontext(&current->context, &home); }

void fail(const char* why) {
    reason = why;
    while (true) yield();
}

unsigned thread_in_cluster() { return static_cast<unsigned>(current - fibers.data()); }

unsigned char* memory_of(unsigned rank) {
    if (rank >= blocks.size()) fail("an address in a block that is not of the cluster");
    return blocks[rank].memory.get();
}

unsigned char* dynamic() { return current->block->memory.get(); }

void* named(int id, unsigned bytes) {
    const auto [found, fresh] = places.try_emplace(id, placed);
    if (fresh) placed += (bytes + 127) / 128 * 128;
    if (placed > NAMED) fail("variables in shared memory do not fit");
    return dynamic() + DYNAMIC + found->second;
}

unsigned offset_of(const void* pointer) {
    const auto offset = static_cast<const unsigned char*>(pointer) - dynamic();
    if (offset < 0 || offset >= static_cast<long>(DYNAMIC + NAMED))
        fail("no address in this block's shared memory");
    return static_cast<unsigned>(offset);
}

unsigned char* at(unsigned address) {
    const unsigned whose = address >> 24, offset = address & 0xFFFFFF;
    const bool launched = offset < shared_bytes,
               variable = offset >= DYNAMIC && offset < DYNAMIC + placed;
    if (!launched && !variable) fail("an address behind shared memory");
    return memory_of(whose ? whose - 1 : rank()) + offset;
}

unsigned rank() { return current->block->rank; }

void pass(unsigned id, unsigned threads) {
    Meeting& here = current->block->meetings[id];
    if (++here.count == threads) here.count = 0, ++here.turn, moved = true;
}

void meet(unsigned id, unsigned threads) {
    Meeting& here = current->block->meetings[id];
    const unsigned turn = here.turn;
    pass(id, threads);
    while (here.turn == turn) yield();
}

void cluster_arrive() {
    met.resize(std::max<std::size_t>(met.size(), current->met + 1));
    if (++met[current->met] == fibers.size()) moved = true;
}

void cluster_wait() {
    const unsigned mine = current->met++;
    while (met[mine] < fibers.size()) yield();
}

const Words* shown(const Words& mine) {
    Warp& warp = current->block->warps[current->thread / 32];
    auto& all = warp.words[current->shown++ % 2];
    all[current->thread % 32] = mine;
    const unsigned turn = warp.turn;
    if (++warp.count == 32) {
        warp.count = 0, ++warp.turn, moved = true;
    } else {
        while (warp.turn == turn) yield();
    }
    return all;
}

const char* run(const Grid& grid, void (*kernel)(const void*), const void* parameters) {
    body = kernel, kernel_parameters = parameters, reason = nullptr, shared_bytes = grid.shared;
    generator.seed(grid.seed);
    gridDim = {grid.blocks, 1, 1}, blockDim = {grid.threads, 1, 1};
    for (unsigned first = 0; first < grid.blocks && !reason; first += grid.cluster) {
        start(first, grid.cluster, grid.threads);
        forget_copies();
        forget_products();
        // later blocks come when it has ended
        if (first == 0) front_begins(grid.front, grid.stretches);
        reason = run_cluster();
    }
    front_ends();
    return reason;
}
}  // namespace emu
