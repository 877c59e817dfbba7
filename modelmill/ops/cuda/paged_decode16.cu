// Decoding over pages of 16 bits: one query a sequence, all query heads of a KV head (up to 8) together.
//
// Keys go from memory to the tensor cores as they are, 16 of them the rows of a product; the query heads are its columns.
// Which channels a lane's words stand for is free, so the query is read in the keys' order and nothing is exchanged.
// Values are turned, two keys by two channels at a time, so that channels are rows. The keys' weights are two numbers of
// 16 bits each: rounded, and what rounding left. What bounds the kernel is memory alone.
//
// A block is WARPS warps, which take KEYS keys of one sequence and KV head in turns, each with a softmax of its own.
// SPLITS blocks of a cluster share a context. Of keys that a query does not see nothing is read: the context's last key
// stands for them, with a weight of zero.
//
// Macros: DIM (64 … 256 in steps of 16), PAGE (8 … 128), GROUP (query heads of a KV head), SPLITS (1, 2, 4, 8), WARPS,
// BLOCKS (that registers are saved for on a multiprocessor), TILES (of 16 keys that a warp takes at once: 1, 2), AGAIN
// (whether the query is read from shared memory for each of them), EARLY (how many times those keys are brought to the L2
// cache while the kernel in front is running: 0 … 2), HALF.
#include "mma.cuh"
#include "half_types.cuh"
#include "paged_decode.cuh"

constexpr int KEYS = 16 * TILES, PAGES = PAGE < KEYS ? KEYS / PAGE : 1;
// Words of two channels of a key, a value that a lane reads; products that make scores.
constexpr int KEY_WORDS = DIM / 8, WORDS = DIM / 16, STEPS = DIM / 16;
static_assert(DIM % 16 == 0 && GROUP >= 1 && GROUP <= 8, "columns of a product are heads");
#ifdef HALF
constexpr float RAISED = 14.0f; // weights are up to 2^RAISED: what is left of a small one is no subnormal number
#else
constexpr float RAISED = 0.0f;
#endif

struct Work {
    const u16 *q, *k, *v;
    const int *tables, *starts, *lengths;
    u16 *out;
    int kv_heads, columns, table_stride, q_stride, q_head, window;
    float scale; // of scores, times log2(e)
    int invite;  // whether the next kernel may be placed before the one in front has ended
};
static_assert(sizeof(Work) == 88, "paged_decode16.py packs 88 bytes");

// An 8 x 8 matrix of 16 bits, of which a lane has columns 2 p, 2 p + 1 of row g: the same of its transpose.
__device__ inline u32 transposed(u32 pair) {
    u32 got;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(got) : "r"(pair));
    return got;
}

// Brings a stretch of memory into the L2 cache, where whoever writes it writes it, too: it may be asked for at any time.
__device__ inline void announce(const u16 *from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

// The words of a row of DIM channels that lane ``at`` of LANES has: 4 side by side as often as they fill a stretch of
// the row, then 2, then 1. Sixteen bytes a lane are stretches of 8 · LANES channels.
template <int LANES> __device__ inline void read_row(u32 (&to)[DIM / 2 / LANES], const u16 *row, int at) {
    constexpr int FULL = DIM / (8 * LANES), LEFT = DIM % (8 * LANES) / LANES; // channels a lane has of the last stretches
#pragma unroll
    for (int i = 0; i < FULL; ++i)
        load_streaming(reinterpret_cast<u32(&)[4]>(to[4 * i]), row + 8 * LANES * i + 8 * at);
    if (LEFT >= 4) load_streaming(reinterpret_cast<u32(&)[2]>(to[LEFT >= 4 ? 4 * FULL : 0]), row + 8 * LANES * FULL + 4 * at);
    if (LEFT % 4 == 2)
        load_streaming(reinterpret_cast<u32(&)[1]>(to[LEFT % 4 == 2 ? DIM / 2 / LANES - 1 : 0]),
             row + 8 * LANES * FULL + LEFT / 4 * 4 * LANES + 2 * at);
}

// The channel that is the first of a value's word: as above, 8 lanes.
__device__ constexpr int channel(int word, int g) {
    return word < DIM / 64 * 4       ? word / 4 * 64 + 8 * g + word % 4 * 2
           : word < DIM / 32 * 2     ? DIM / 64 * 64 + 4 * g + word % 2 * 2
                                     : DIM / 32 * 32 + 2 * g;
}

// What a lane reads of 16 keys: of keys g and g + 8; and of the values of keys 2 p, 2 p + 1, 2 p + 8, 2 p + 9.
struct KeyTile {
    u32 rows[TILES][2][KEY_WORDS];
};

struct Values {
    u32 rows[TILES][4][WORDS];
};

struct Pages {
    int at[PAGES];
};

struct Reader {
    const Work &w;
    const int *table;
    int head, first, length; // keys that the query sees: first … length − 1
    int g, p;
    long long spare; // where key length − 1 lies

    // Of a block of keys, also where it is behind the last one: what the table says there is not used.
    __device__ Pages pages(int block) const {
        Pages found;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) {
            const int column = PAGE < KEYS ? block * PAGES + i : static_cast<u32>(block) / (PAGE / KEYS);
            found.at[i] = table[min(column, w.columns - 1)];
        }
        return found;
    }

    // Where a key lies in the cache, in keys.
    __device__ long long place(int page, int inside) const {
        return (static_cast<long long>(page) * w.kv_heads + head) * PAGE + inside;
    }

    // Of the key that is number 8 · eighth + slot in its block.
    __device__ long long place(const Pages &pages, int block, int eighth, int slot) const {
        const int key = block * KEYS + 8 * eighth + slot;
        const int page = PAGE < KEYS ? 8 * eighth / PAGE : 0, inside = PAGE < KEYS ? 8 * eighth % PAGE + slot : key & (PAGE - 1);
        const bool seen = static_cast<u32>(key - first) < static_cast<u32>(length - first);
        return seen ? place(pages.at[page], inside) : spare;
    }

    // Pages, or the parts of them, of keys that will be read soon.
    __device__ void announce_all(const Pages &pages, int block) const {
        constexpr int SPAN = PAGE < KEYS ? PAGE : KEYS;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) {
            const int key = block * KEYS + i * PAGE;
            if (key >= length || key + SPAN <= first) continue;
            const long long at = place(pages.at[i], PAGE < KEYS ? 0 : key & (PAGE - 1)) * DIM;
            announce(w.k + at, 2 * DIM * SPAN), announce(w.v + at, 2 * DIM * SPAN);
        }
    }

    __device__ void read(KeyTile &to, const Pages &pages, int block) const {
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) read_row<4>(to.rows[i / 2][i % 2], w.k + place(pages, block, i, g) * DIM, p);
    }

    __device__ void read(Values &to, const Pages &pages, int block) const {
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i)
            read_row<8>(to.rows[i / 4][i % 4], w.v + place(pages, block, i / 2, 2 * p + i % 2) * DIM, g);
    }
};

// The query's words, two a product, of each lane: read again for every block of keys, its registers are worth more to
// keys on their way.
struct Query {
    uint2 words[AGAIN ? STEPS : 1][32];
};

__device__ inline void hold(Query &to, const u32 (&query)[KEY_WORDS]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) to.words[AGAIN ? i : 0][threadIdx.x % 32] = {query[2 * i], query[2 * i + 1]};
}

__device__ inline uint2 again(const uint2 &words) {
    uint2 got;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(got.x), "=r"(got.y) : "r"(shared_address(&words)));
    return got;
}

// Scores of a tile: of keys g (0, 1) and g + 8 (2, 3), heads 2 p and 2 p + 1.
__device__ inline void scores(float (&to)[4], const u32 (&keys)[2][KEY_WORDS], const u32 (&query)[KEY_WORDS],
                              const Query &held) {
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f}; // two chains: a product waits for the one before it in its own
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const uint2 right = AGAIN ? again(held.words[i][threadIdx.x % 32]) : uint2{query[2 * i], query[2 * i + 1]};
        multiply(i % 2 == 0 ? to : odd, keys[0][2 * i], keys[1][2 * i], keys[0][2 * i + 1], keys[1][2 * i + 1], right.x,
                 right.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += odd[i];
}

// Of heads 2 p and 2 p + 1.
struct Softmax {
    float top[2] = {-1e30f, -1e30f}, mass[2] = {0.0f, 0.0f}; // of the warp; of this lane's keys
    float mixed[WORDS][4] = {};                              // channels of a word, a head each: 2 p, 2 p + 1, 2 p, …

    // score: −∞ of keys that are not seen.
    __device__ void add(const Values &values, const float (&score)[TILES][4]) {
        float keep[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float most = top[head];
#pragma unroll
            for (int t = 0; t < TILES; ++t) most = fmaxf(most, fmaxf(score[t][head], score[t][2 + head]));
#pragma unroll
            for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
            keep[head] = exp2_fast(top[head] - most);
            top[head] = most, mass[head] *= keep[head];
        }
        const float from[2] = {top[0] - RAISED, top[1] - RAISED};
#pragma unroll
        for (int i = 0; i < 4 * WORDS; ++i) mixed[i / 4][i % 4] *= keep[i % 2];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            u32 near[2], left[2]; // right operands: the weights rounded, and what that left
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float one = exp2_fast(score[t][2 * i] - from[0]);
                const float two = exp2_fast(score[t][2 * i + 1] - from[1]);
                const u32 pair = rounded_pair(one, two);
                mass[0] += one, mass[1] += two;
                near[i] = transposed(pair), left[i] = transposed(rounded_pair(one - low(pair), two - high(pair)));
            }
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const u32 a = values.rows[t][0][i], b = values.rows[t][1][i], c = values.rows[t][2][i],
                          d = values.rows[t][3][i];
                const u32 a0 = __byte_perm(a, b, 0x5410), a1 = __byte_perm(a, b, 0x7632);
                const u32 a2 = __byte_perm(c, d, 0x5410), a3 = __byte_perm(c, d, 0x7632);
                multiply(mixed[i], a0, a1, a2, a3, left[0], left[1]);
                multiply(mixed[i], a0, a1, a2, a3, near[0], near[1]);
            }
        }
    }
};

__device__ inline void store_warp(Parts<GROUP> &found, Softmax &mine, int warp, int g, int p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = 2 * p + i;
#pragma unroll
        for (int by = 4; by < 32; by *= 2) mine.mass[i] += __shfl_xor_sync(~0u, mine.mass[i], by);
        if (head >= GROUP) continue;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            float *to = &found.mixed[warp][head][channel(word, g)];
            to[0] = mine.mixed[word][i], to[1] = mine.mixed[word][2 + i];
        }
        if (g == 0) found.top[warp][head] = mine.top[i], found.mass[warp][head] = mine.mass[i];
    }
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(SPLITS, 1, 1)
#endif
__launch_bounds__(32 * WARPS, BLOCKS)
    paged_decode16(const __grid_constant__ Work w) {
    __shared__ Parts<GROUP> found;
    const int split = SPLITS > 1 ? cluster_rank() : 0, pair = blockIdx.x / SPLITS;
    const int sequence = pair / w.kv_heads, head = pair - sequence * w.kv_heads;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, p = threadIdx.x % 4;
    const int row = w.starts[sequence], rows = w.starts[sequence + 1] - row, length = w.lengths[sequence];
    const int first = w.window > 0 ? max(length - w.window, 0) : 0;
    const int begin = first / KEYS, blocks = (length + KEYS - 1) / KEYS - begin, each = (blocks + SPLITS - 1) / SPLITS;
    const int end = begin + min((split + 1) * each, blocks);
    int block = begin + split * each + warp;
    Reader reader = {w, w.tables + static_cast<long long>(sequence) * w.table_stride, head, first, length,
                     g, p, 0};
    Pages pages = reader.pages(block), pages_behind = reader.pages(block + WARPS);
    const int last = max(length - 1, 0);
    reader.spare = reader.place(reader.table[min(last / PAGE, w.columns - 1)], last & (PAGE - 1));
    if (EARLY > 0 && threadIdx.x % 32 == 0) {
        if (rows == 1 && block < end) reader.announce_all(pages, block);
        if (EARLY > 1 && rows == 1 && block + WARPS < end) reader.announce_all(pages_behind, block + WARPS);
    }
    if (w.invite) pdl_launch_dependents();
    pdl_wait();
    if (!w.invite) pdl_launch_dependents();
    if (rows != 1) return;
    KeyTile keys;
    if (block < end) reader.read(keys, pages, block);
    __shared__ Query held;
    u32 query[KEY_WORDS] = {}; // this lane's share of right operands: of head g, in the keys' order
    if (g < GROUP && (!AGAIN || warp == 0))
        read_row<4>(query, w.q + static_cast<long long>(row) * w.q_stride + (head * GROUP + g) * w.q_head, p);
    if (AGAIN) {
        if (warp == 0) hold(held, query);
        __syncthreads();
    }
    Softmax mine;
    for (; block < end; block += WARPS) {
        // The next keys are on their way beside these values, in the registers that these keys leave.
        Values values;
        reader.read(values, pages, block);
        pages = pages_behind, pages_behind = reader.pages(block + 2 * WARPS);
        float score[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            scores(score[t], keys.rows[t], query, held);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = block * KEYS + 16 * t + 8 * (i / 2) + g;
                score[t][i] = key >= first && key < length ? score[t][i] * w.scale : __int_as_float(0xff800000); // −∞
            }
        }
        if (block + WARPS < end) reader.read(keys, pages, block + WARPS);
        mine.add(values, score);
    }
    store_warp(found, mine, warp, g, p);
    __syncthreads();
    join_warps(found);
    if (SPLITS > 1)
        cluster_sync();
    else
        __syncthreads();
    u16 *out = w.out + (static_cast<long long>(row) * w.kv_heads + head) * GROUP * DIM;
    finish(found, out, split, 1.0f);
    if (SPLITS > 1) cluster_sync(); // a block that ended could not be read
}
