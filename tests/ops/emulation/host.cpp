#include SOURCE
alignas(1024) unsigned char shared[256 << 10];
Three threadIdx, blockIdx, blockDim, gridDim;
namespace emu {
struct Fiber { ucontext_t context; std::vector<char> stack; bool done = false; };
static ucontext_t home; static std::vector<Fiber> fibers; static int current;
static std::vector<Lane> registers; static std::map<u32, Barrier> barriers;
static std::vector<std::pair<int, std::function<void()>>> queue;
static std::mt19937 generator(1);
static std::vector<int> warp_count, warp_turn; static int block_count, block_turn;
bool broken;
void yield() { swapcontext(&fibers[current].context, &home); }
void meet_warp() {
    const int w = current / 32, turn = warp_turn[w];
    if (++warp_count[w] == 32) warp_count[w] = 0, ++warp_turn[w];
    else while (warp_turn[w] == turn) yield();
}
void meet_block() {
    const int turn = block_turn;
    if (++block_count == static_cast<int>(fibers.size())) block_count = 0, ++block_turn;
    else while (block_turn == turn) yield();
}
Lane *lanes() { return &registers[current / 32 * 32]; }
std::vector<std::pair<int, std::function<void()>>> &late() { return queue; }
Barrier &barrier(u32 at) { return barriers[at]; }
std::mt19937 &random() { return generator; }
static std::function<void()> body;
static void enter() { body(); fibers[current].done = true; swapcontext(&fibers[current].context, &home); }
static int run(int threads) {
    fibers.assign(threads, {}); registers.assign(threads, {}); barriers.clear(); queue.clear();
    warp_count.assign(threads / 32, 0); warp_turn.assign(threads / 32, 0); block_count = block_turn = 0;
    broken = false;
    for (auto &b : shared) b = 0xCC;
    for (auto &f : fibers) {
        f.stack.resize(96 << 10); getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(); f.context.uc_stack.ss_size = f.stack.size(); f.context.uc_link = &home;
        makecontext(&f.context, enter, 0);
    }
    std::vector<int> order(threads / 32); for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (long long idle = 0, left = threads; left;) {
        std::shuffle(order.begin(), order.end(), generator);
        bool moved = false;
        if (broken) return 3;
        for (int w : order) {
            if (generator() % 4 == 0) continue; // some warps lag behind
            for (int l = 0; l < 32; ++l) {
                current = w * 32 + l;
                if (fibers[current].done) continue;
                threadIdx = {static_cast<u32>(current), 0, 0};
                swapcontext(&home, &fibers[current].context);
                if (fibers[current].done) --left, moved = true;
            }
        }
        for (int n = generator() % 48 ? 0 : 1 + generator() % 4; n > 0 && queue.size(); --n) { // late: who does not wait is seen
            size_t i = generator() % queue.size(); auto f = queue[i].second; queue.erase(queue.begin() + i); f(); moved = true;
        }
        idle = moved ? 0 : idle + 1;
        if (idle > 4000) { fprintf(stderr, "emulation: nobody moves\n"); return 1; }
    }
    if (!queue.empty()) { fprintf(stderr, "emulation: copies left at the end\n"); return 2; }
    return 0;
}
}
extern "C" int emulate(const void *map, const void *work, int blocks, int threads, int seed) {
    TensorMap m; Work w; memcpy(&m, map, sizeof m); memcpy(&w, work, sizeof w);
    emu::generator.seed(seed); gridDim = {static_cast<u32>(blocks), 1, 1}; blockDim = {static_cast<u32>(threads), 1, 1};
    for (int b = 0; b < blocks; ++b) {
        blockIdx = {static_cast<u32>(b), 0, 0};
        emu::body = [&] { KERNEL(m, w); };
        if (int bad = emu::run(threads)) return bad;
    }
    return 0;
}
