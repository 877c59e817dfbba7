// Prefill attention over the paged KV cache for Hopper, in the manner of FlashAttention-3 (Shah et al. 2024,
// arXiv:2407.08608).
//
// A block of threads is three warpgroups. One warp of the first, the loader, has the copy engine bring tiles of queries
// and blocks of keys and values into shared memory, page by page; the other two, the mixers, own 64 queries of the tile
// each. Everything between them is an mbarrier: "full" ends when bytes have landed, "empty" when all 8 mixer warps have
// read them. Each multiprocessor runs one block, which takes one tile of work after another until none is left; the
// loader fetches the next tile while the mixers still compute, so that nobody waits where tiles are short.
//
// What keeps the tensor cores busy, of which exponentials would otherwise take half the time:
//   * within a warpgroup, the scores of the next block and the mixture of the last one are products in flight while
//     the softmax of the block between them is computed;
//   * between the two warpgroups, named barriers keep them in turn: one issues products while the other is at its
//     softmax.
//
// Compile-time: DIM (64 or 128), PAGE (8 … 128), HALF (float16 instead of bfloat16).
#include "hopper.cuh"

#ifndef DIM
#define DIM 128
#endif
#ifndef PAGE
#define PAGE 16
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef TURNS
#define TURNS 1
#endif

constexpr int QUERIES = 128;         // of a tile, 64 a mixer
constexpr int KEYS = 128;            // of a block
constexpr int HALVES = DIM / 64;     // columns of 128 bytes, the widest that the swizzle allows
constexpr int PAGES = KEYS / PAGE;   // of a block
constexpr int MOST_SEQUENCES = 1024; // known to paged_attention.py
constexpr int THREADS = 384, MIXERS = 2, MIXER_WARPS = 8;
constexpr u32 TILE = 1024; // 8 rows of 128 bytes
// Queries: all rows of the first half, then those of the second. Keys and values: both halves of 8 rows, then of the
// next 8, so that one request brings a whole page.
constexpr u32 Q_HALF = QUERIES * 128, K_ROWS = HALVES * TILE;
constexpr u32 Q_BYTES = QUERIES * DIM * 2, BLOCK_BYTES = KEYS * DIM * 2, PAGE_BYTES = PAGE * DIM * 2;
constexpr int TURN = 1, CLEANED = TURN + MIXERS; // named barriers, one of each for each mixer
static_assert(PAGES <= 32 && PAGE >= 8, "a lane copies a page");

// Everything but the tensors' descriptors; paged_attention.py packs the same.
struct Work {
    const int *tables, *starts, *lengths;
    void *out;
    int *taken; // tiles that blocks have asked for, beyond their first
    int batch, columns, table_stride, heads, group, pages, window, skip_single, heads_at_once;
    float scale; // of scores, times log2(e): exponentials are powers of two
};

struct Tile {
    int row;      // of q and out where it begins; −1: no more work
    int rows;     // that exist
    int head;
    int position; // of its first query in the sequence
    int context;  // keys that exist
    int first, last; // blocks of keys that its queries see; last < first: none
};

struct Barriers {
    u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// A place in a ring of STAGES buffers, and the parity of the phase in which that buffer is filled.
struct Place {
    int stage = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// What a block keeps beside the tiles. before[b]: tiles of the sequences in front of b.
struct Plan {
    Barriers barriers;
    Tile tile;
    int before[MOST_SEQUENCES], start[MOST_SEQUENCES + 1], length[MOST_SEQUENCES];
};

extern __shared__ __align__(1024) unsigned char shared[];
constexpr u32 AT_K = Q_BYTES, AT_V = AT_K + STAGES * BLOCK_BYTES, AT_PLAN = AT_V + STAGES * BLOCK_BYTES;
constexpr u32 PLAN_BYTES = 13 * 1024; // known to paged_attention.py, which asks for AT_PLAN + PLAN_BYTES
static_assert(sizeof(Plan) <= PLAN_BYTES, "the plan outgrows its place");

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }
__device__ inline int larger(int a, int b) { return a > b ? a : b; }

// ---- The loader

// Reads the sequences' lengths once and counts the tiles in front of each. Returns how many there are.
__device__ int make_plan(Plan &plan, const Work &work, int lane) {
    int total = 0;
    for (int base = 0; base < work.batch; base += 32) {
        const int b = base + lane;
        const bool real = b < work.batch;
        const int start = real ? work.starts[b] : 0, rows = real ? work.starts[b + 1] - start : 0;
        const int tiles = work.skip_single && rows == 1 ? 0 : (rows + QUERIES - 1) / QUERIES;
        int sum = tiles;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (real) {
            plan.before[b] = total + sum - tiles;
            plan.start[b] = start;
            plan.start[b + 1] = start + rows;
            plan.length[b] = work.lengths[b];
        }
        total += __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();
    return total;
}

// Tile number ``index`` in the order of service: some heads at a time, so that their keys stay in the L2 cache while all
// tiles of those heads read them; among those, the last queries first, which have the most keys, so that no large tile
// is left over at the end. Returns the sequence.
__device__ int find_tile(Tile &tile, const Plan &plan, const Work &work, int total, int index) {
    const int round = index / (total * work.heads_at_once), left = index - round * total * work.heads_at_once;
    const int number = total - 1 - left / work.heads_at_once;
    tile.head = round * work.heads_at_once + left % work.heads_at_once;
    int b = 0; // the last sequence with before[b] <= number
    for (int step = MOST_SEQUENCES; step > 0; step /= 2)
        if (b + step < work.batch && plan.before[b + step] <= number) b += step;
    const int offset = (number - plan.before[b]) * QUERIES, rows = plan.start[b + 1] - plan.start[b];
    tile.row = plan.start[b] + offset;
    tile.rows = smaller(rows - offset, QUERIES);
    tile.context = plan.length[b];
    tile.position = tile.context - rows + offset;
    tile.first = work.window > 0 ? larger(tile.position + 1 - work.window, 0) / KEYS : 0;
    tile.last = tile.context > 0 ? (tile.position + tile.rows - 1) / KEYS : -1; // a context of 0 is padding
    return b;
}

// Lane's share of a block of keys or values: one page. A page past the context is asked for by a number that does not
// exist, and arrives as zeros.
__device__ inline void load_block(u32 target, const TensorMap &map, u32 full, u32 empty, u32 parity, int rows, int lane) {
    wait(empty, parity ^ 1);
    if (lane == 0) arrive_expecting(full, BLOCK_BYTES);
    __syncwarp();
    if (lane < PAGES) load_box(target + lane * PAGE_BYTES, map, full, 0, 0, 0, rows);
}

__device__ void load(
    const TensorMap &q_map, const TensorMap &k_map, const TensorMap &v_map, const Work &work, Plan &plan, int lane) {
    const u32 base = shared_address(shared);
    Barriers &barriers = plan.barriers;
    const int total = make_plan(plan, work, lane), count = total * work.heads;
    Place k, v;
    u32 parity = 0;
    for (int index = blockIdx.x; index < count; parity ^= 1) {
        // The tile after this one, asked for now: the answer takes as long as a load.
        int next = 0;
        if (lane == 0) next = gridDim.x + atomicAdd(work.taken, 1);
        Tile tile;
        const int b = find_tile(tile, plan, work, total, index);
        const int *table = work.tables + b * static_cast<long long>(work.table_stride);
        const int kv_heads = work.heads / work.group, kv_head = tile.head / work.group;
        const int reach = smaller((tile.context + PAGE - 1) / PAGE, work.columns); // pages that exist
        // Of the lane's page in a block: where its rows begin in the cache, in eights.
        auto rows_of = [&](int block) {
            const int column = block * PAGES + lane;
            const int page = lane < PAGES && block >= tile.first && column < reach ? table[column] : work.pages;
            return (page * kv_heads + kv_head) * (PAGE / 8);
        };
        int rows = rows_of(tile.last), rows_behind = 0;
        wait(shared_address(&barriers.q_empty), parity ^ 1);
        if (lane == 0) {
            plan.tile = tile;
            const u32 full = shared_address(&barriers.q_full);
            arrive_expecting(full, Q_BYTES);
            for (int half = 0; half < HALVES; ++half)
                load_box(base + half * Q_HALF, q_map, full, half * 64, tile.head, tile.row);
        }
        // In the order in which they are used: the values of a block after the keys of the next.
        for (int block = tile.last; block >= tile.first - 1; --block) {
            const int rows_ahead = rows_of(block - 1);
            if (block >= tile.first) {
                load_block(base + AT_K + k.stage * BLOCK_BYTES, k_map, shared_address(&barriers.k_full[k.stage]),
                           shared_address(&barriers.k_empty[k.stage]), k.parity, rows, lane);
                k.advance();
            }
            if (block < tile.last) {
                load_block(base + AT_V + v.stage * BLOCK_BYTES, v_map, shared_address(&barriers.v_full[v.stage]),
                           shared_address(&barriers.v_empty[v.stage]), v.parity, rows_behind, lane);
                v.advance();
            }
            rows_behind = rows, rows = rows_ahead;
        }
        index = __shfl_sync(~0u, next, 0);
    }
    wait(shared_address(&barriers.q_empty), parity ^ 1);
    if (lane == 0) {
        plan.tile.row = -1;
        arrive(shared_address(&barriers.q_full));
    }
}

// ---- A mixer

constexpr int SCORES = KEYS / 2, MIXED = DIM / 2, WEIGHTS = KEYS / 4; // registers of a thread

// The running softmax of a thread's two rows, in units of scores (not yet scaled).
struct Softmax {
    float top[2], mass[2], keep[2]; // mass: of this thread's columns only; keep: what remains of the mixture so far

    // Scores become weights 2^(scale · (score − top)), by the top of all blocks so far.
    __device__ void weigh(float (&s)[SCORES], float scale) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
#if TREE
            float most = top[row], others = s[2 * row + 1]; // two chains: each step waits for the one before
#pragma unroll
            for (int i = 2 * row; i < SCORES; i += 4) {
                most = fmaxf(most, s[i]);
                others = fmaxf(others, s[i + 1]);
            }
            most = fmaxf(most, others);
#else
            float most = top[row];
#pragma unroll
            for (int i = 2 * row; i < SCORES; i += 4) most = fmaxf(most, fmaxf(s[i], s[i + 1]));
#endif
            // A row's columns are spread over four neighbouring lanes.
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            keep[row] = exp2_fast((top[row] - most) * scale);
            top[row] = most;
            const float shift = most * scale;
            float sum = 0.0f;
#pragma unroll
            for (int i = 2 * row; i < SCORES; i += 4) {
                s[i] = exp2_fast(s[i] * scale - shift);
                s[i + 1] = exp2_fast(s[i + 1] * scale - shift);
                sum += s[i] + s[i + 1];
            }
            mass[row] = mass[row] * keep[row] + sum;
        }
    }
};

// Hides from each query the keys behind its own position, and those that its window has left behind.
// seen: of the thread's first row, the position minus the number of its first column.
__device__ inline void mask(float (&s)[SCORES], int seen, int window) {
    const int least = window > 0 ? seen - window : -(1 << 30);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        const int column = i / 4 * 8 + i % 2, down = i % 4 / 2 * 8;
        if (column > seen + down || column <= least + down) s[i] = __int_as_float(0xff800000); // −∞
    }
}

// S = Q · Kᵀ of this mixer's 64 queries and a block of keys.
__device__ inline void issue_scores(float (&s)[SCORES], u32 q, u32 k) {
    products_begin();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int half = step / 4, inside = step % 4 * 32;
        product(s, along_rows(q + half * Q_HALF + inside, TILE), along_rows(k + half * TILE + inside, K_ROWS), step > 0);
    }
    products_end();
}

// O += P · V: the weights stay in registers, where the scores' layout is that of an operand once rounded.
__device__ inline void issue_mixture(float (&o)[MIXED], u32 (&p)[WEIGHTS], u32 v) {
    products_begin();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
        product(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                along_columns(v + step * 2 * K_ROWS, TILE, K_ROWS));
    products_end();
}

__device__ inline void round_weights(u32 (&p)[WEIGHTS], const float (&s)[SCORES]) {
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) p[i] = rounded_pair(s[2 * i], s[2 * i + 1]);
}

__device__ inline void rescale(float (&o)[MIXED], const float (&keep)[2]) {
#pragma unroll
    for (int i = 0; i < MIXED; ++i) o[i] *= keep[i % 4 / 2];
}

// Slots of the last page that hold no token may hold anything; a weight of 0 does not silence a NaN among the values.
// Both mixers write the same zeros, so that neither needs to wait for the other.
__device__ inline void clean_values(u32 offset, int begin, int mixer, int thread) {
    const int end = (begin + PAGE - 1) / PAGE * PAGE;
    for (int i = thread; i < (end - begin) * 8 * HALVES; i += 128) {
        const int piece = i % 8, half = i / 8 % HALVES, row = begin + i / (8 * HALVES);
        const u32 at = offset + row / 8 * K_ROWS + half * TILE + row % 8 * 128;
        reinterpret_cast<uint4 *>(shared + at)[piece] = make_uint4(0, 0, 0, 0);
    }
    fence_async();
    meet(CLEANED + mixer, 128);
}

// Divides by the mass and writes the rows that exist. Four lanes hold two columns each of four pieces of eight; they
// exchange them so that each writes one piece, 16 bytes.
__device__ inline void write_rows(const float (&o)[MIXED], Softmax &softmax, const Tile &tile, const Work &work, int row) {
    const int lane = threadIdx.x % 4;
    u32 *out = static_cast<u32 *>(work.out);
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        float mass = softmax.mass[down];
        mass += __shfl_xor_sync(~0u, mass, 1);
        mass += __shfl_xor_sync(~0u, mass, 2);
        const float share = mass > 0.0f ? 1.0f / mass : 0.0f;
        const bool real = row + 8 * down < tile.rows;
        const long long at = (static_cast<long long>(tile.row + row + 8 * down) * work.heads + tile.head) * (DIM / 2);
#pragma unroll
        for (int i = 0; i < MIXED; i += 16) {
            u32 a[4];
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                const int from = i + 4 * piece + 2 * down;
                a[piece] = rounded_pair(o[from] * share, o[from + 1] * share);
            }
            const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
                const u32 got = __shfl_xor_sync(~0u, odd ? a[pair] : a[pair + 1], 1);
                (odd ? a[pair] : a[pair + 1]) = got;
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const u32 got = __shfl_xor_sync(~0u, upper ? a[pair] : a[pair + 2], 2);
                (upper ? a[pair] : a[pair + 2]) = got;
            }
            if (real) *reinterpret_cast<uint4 *>(out + at + i + 4 * lane) = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
}

__device__ inline void my_turn(int mixer) {
    if (TURNS) meet(TURN + mixer, 128 * MIXERS);
}

__device__ inline void your_turn(int mixer) {
    if (TURNS) pass(TURN + 1 - mixer, 128 * MIXERS);
}

__device__ void mix(const Work &work, Plan &plan, int mixer) {
    const u32 base = shared_address(shared), q = base + mixer * 64 * 128;
    const int thread = threadIdx.x % 128, lane = thread % 32, row = mixer * 64 + thread / 32 * 16 + lane / 4;
    Barriers &barriers = plan.barriers;
    Place k, v;
    auto release = [&](u64 &barrier) {
        if (lane == 0) arrive(shared_address(&barrier));
    };
    if (mixer == 1) your_turn(mixer);
    for (u32 parity = 0;; parity ^= 1) {
        wait(shared_address(&barriers.q_full), parity);
        const Tile tile = plan.tile;
        if (tile.row < 0) return;
        float s[SCORES], o[MIXED];
        u32 p[WEIGHTS];
        Softmax softmax;
        // Not −∞, whose differences are NaN where a row sees no key of a block.
        softmax.top[0] = softmax.top[1] = -1e30f;
        softmax.mass[0] = softmax.mass[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < MIXED; ++i) o[i] = 0.0f;
        auto mask_edges = [&](int block) {
            const int upper = tile.position + mixer * 64, begin = block * KEYS; // upper: the first row's position
            if (begin + KEYS - 1 > upper || (work.window > 0 && begin <= upper + 63 - work.window))
                mask(s, tile.position + row - begin - lane % 4 * 2, work.window);
        };
        if (tile.last >= tile.first) {
            wait(shared_address(&barriers.k_full[k.stage]), k.parity);
            issue_scores(s, q, base + AT_K + k.stage * BLOCK_BYTES);
            products_wait<0>();
            changed(s);
            release(barriers.k_empty[k.stage]);
            k.advance();
            mask_edges(tile.last);
            softmax.weigh(s, work.scale);
            round_weights(p, s);
            const int real = tile.context - tile.last * KEYS; // keys of this block
            if (real < KEYS && real % PAGE != 0) {
                wait(shared_address(&barriers.v_full[v.stage]), v.parity);
                clean_values(AT_V + v.stage * BLOCK_BYTES, real, mixer, thread);
            }
            if (tile.last > tile.first) wait(shared_address(&barriers.k_full[k.stage]), k.parity);
            for (int block = tile.last - 1; block >= tile.first; --block) {
                my_turn(mixer);
                issue_scores(s, q, base + AT_K + k.stage * BLOCK_BYTES);
                rescale(o, softmax.keep); // while the scores are computed
                wait(shared_address(&barriers.v_full[v.stage]), v.parity);
                issue_mixture(o, p, base + AT_V + v.stage * BLOCK_BYTES);
                your_turn(mixer);
                products_wait<1>(); // the scores
                changed(s);
                release(barriers.k_empty[k.stage]);
                k.advance();
                mask_edges(block);
                softmax.weigh(s, work.scale); // while values are mixed
                changed(s);
                // The next keys are waited for here, not where they are used: the compiler would move the wait for the
                // mixture up in front of the softmax, were there not a branch between the two.
                if (block > tile.first) wait(shared_address(&barriers.k_full[k.stage]), k.parity);
                products_wait<0>();
                changed(o);
                changed(s); // the weights that the product read may be overwritten only now
                release(barriers.v_empty[v.stage]);
                v.advance();
                round_weights(p, s);
            }
            release(barriers.q_empty);
            rescale(o, softmax.keep);
            wait(shared_address(&barriers.v_full[v.stage]), v.parity);
            issue_mixture(o, p, base + AT_V + v.stage * BLOCK_BYTES);
            products_wait<0>();
            changed(o);
            release(barriers.v_empty[v.stage]);
            v.advance();
        } else {
            release(barriers.q_empty);
        }
        write_rows(o, softmax, tile, work, row);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ Work work) {
    Plan &plan = *reinterpret_cast<Plan *>(shared + AT_PLAN);
    if (threadIdx.x == 0) {
        Barriers &barriers = plan.barriers;
        barrier_init(shared_address(&barriers.q_full), 1);
        barrier_init(shared_address(&barriers.q_empty), MIXER_WARPS);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&barriers.k_full[i]), 1);
            barrier_init(shared_address(&barriers.k_empty[i]), MIXER_WARPS);
            barrier_init(shared_address(&barriers.v_full[i]), 1);
            barrier_init(shared_address(&barriers.v_empty[i]), MIXER_WARPS);
        }
        barriers_ready();
        prefetch_map(q_map);
        prefetch_map(k_map);
        prefetch_map(v_map);
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // The loader needs few registers, the mixers as many as there are: 40 + 2 · 232 = 3 · 168, what the block began with.
    if (group == 0) {
        keep_registers<40>();
        if (threadIdx.x < 32) load(q_map, k_map, v_map, work, plan, threadIdx.x);
    } else {
        take_registers<232>();
        mix(work, plan, group - 1);
    }
}
