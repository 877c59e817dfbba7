// Decode attention over 16-bit KV pages, bound by memory bandwidth.
//
// Computes: out[B, heads · DIM] for one query q[B, heads, DIM] per sequence; all GROUP query heads
//     of a KV head together; sinks
// Dtypes: q, KV pages and out bfloat16 or float16; float32 sums
// Layout: K and V pages [pages, kv_heads, PAGE, DIM]; int32 page tables
// Range: decode, 16-bit pages; DIM 64, 80, 96, 112, 128 or 256, PAGE 8 … 128 (a power of two),
//     GROUP ≤ 8
// Technique: mma.sync m16n8k16, split-KV over a thread-block cluster (DSMEM), L2 prefetch before
//     griddepcontrol.wait, PDL
// Ops: paged_attention (launched by paged_decode16.py)
//
// QKᵀ: 16 keys are the rows (A) of mma.m16n8k16 and the query heads its columns; keys are used in
// the order in which they were loaded, and the query is permuted along DIM to match. PV: values are
// transposed two keys by two channels at a time, so that channels are the rows; P is split in two
// 16-bit numbers, the rounded weight and its residual.
//
// A block has WARPS warps, each with KEYS keys at a time of one sequence and KV head and its own
// online softmax. SPLITS blocks of a cluster share a context (split-KV) and merge through DSMEM.
// Masked keys are not read: the context's last key is loaded in their place with weight 0.
//
// Macros: DIM (64 … 256 in steps of 16), PAGE (8 … 128), GROUP (query heads of a KV head), SPLITS
// (1, 2, 4, 8), WARPS, BLOCKS (per SM, for __launch_bounds__), KEY_TILES (tiles of 16 keys that a
// warp processes at once: 1, 2), RELOAD_QUERY (the query is reloaded from shared memory per tile
// instead of held in registers), L2_PREFETCH (tiles that are prefetched to L2 before the previous
// kernel has ended: 0 … 2), SINKS, HALF.
#include "common/mma.cuh"
#include "common/half_types.cuh"
#include "attention/paged_decode.cuh"

constexpr int KEYS = 16 * KEY_TILES, PAGES = PAGE < KEYS ? KEYS / PAGE : 1;
// Words (two channels) of a key and of a value per lane; mma steps of QKᵀ.
constexpr int KEY_WORDS = DIM / 8, WORDS = DIM / 16, STEPS = DIM / 16;
static_assert(DIM % 16 == 0 && GROUP >= 1 && GROUP <= 8, "the columns of the mma are query heads");
#ifdef HALF
// weights are up to 2^14, so that residuals are not subnormal
constexpr float WEIGHT_EXPONENT = 14.0f;
#else
constexpr float WEIGHT_EXPONENT = 0.0f;
#endif

struct Work {
    const u16 *q, *k, *v;
    const int *tables, *starts, *lengths;
    u16* out;
    const float* sinks;  // a logit of each query head, with SINKS
    int kv_heads, columns, table_stride, q_stride, q_head, window;
    float scale;       // of scores, times log2(e)
    int pdl_at_start;  // PDL trigger before the wait instead of after it
};
static_assert(sizeof(Work) == 96, "paged_decode16.py packs 96 bytes");

// Prefetches memory into L2. Safe before griddepcontrol.wait: L2 is coherent with later writes.
__device__ inline void l2_prefetch(const u16* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

// Loads lane `at` of LANES's words of a row of DIM channels: 16-byte loads while they cover the
// lanes (8 · LANES channels each), then 8- and 4-byte loads for the rest.
template <int LANES>
__device__ inline void read_row(u32 (&to)[DIM / 2 / LANES], const u16* row, int at) {
    // channels per lane in the remainder
    constexpr int FULL = DIM / (8 * LANES), LEFT = DIM % (8 * LANES) / LANES;
#pragma unroll
    for (int i = 0; i < FULL; ++i)
        load_streaming(reinterpret_cast<u32(&)[4]>(to[4 * i]), row + 8 * LANES * i + 8 * at);
    if (LEFT >= 4)
        load_streaming(reinterpret_cast<u32(&)[2]>(to[LEFT >= 4 ? 4 * FULL : 0]),
                       row + 8 * LANES * FULL + 4 * at);
    if (LEFT % 4 == 2)
        load_streaming(reinterpret_cast<u32(&)[1]>(to[LEFT % 4 == 2 ? DIM / 2 / LANES - 1 : 0]),
                       row + 8 * LANES * FULL + LEFT / 4 * 4 * LANES + 2 * at);
}

// First channel of a value's word in read_row<8>.
__device__ constexpr int channel(int word, int g) {
    return word < DIM / 64 * 4   ? word / 4 * 64 + 8 * g + word % 4 * 2
           : word < DIM / 32 * 2 ? DIM / 64 * 64 + 4 * g + word % 2 * 2
                                 : DIM / 32 * 32 + 2 * g;
}

// A lane's registers per 16 keys: keys g and g + 8; values of keys 2 p, 2 p + 1, 2 p + 8, 2 p + 9.
struct KeyTile {
    u32 rows[KEY_TILES][2][KEY_WORDS];
};

struct Values {
    u32 rows[KEY_TILES][4][WORDS];
};

struct Pages {
    int at[PAGES];
};

struct Reader {
    const Work& w;
    const int* table;
    int head, first, length;  // visible keys: first … length − 1
    int g, p;
    long long spare;  // cache position of key length − 1, loaded for masked keys

    // Pages of a block of keys; past the last block the entries are not used.
    __device__ Pages pages(int block) const {
        Pages result;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) {
            const int column =
                PAGE < KEYS ? block * PAGES + i : static_cast<u32>(block) / (PAGE / KEYS);
            result.at[i] = table[min(column, w.columns - 1)];
        }
        return result;
    }

    // Cache position of a key, in units of keys.
    __device__ long long place(int page, int inside) const {
        return (static_cast<long long>(page) * w.kv_heads + head) * PAGE + inside;
    }

    // Cache position of key 8 · eighth + slot of the block.
    __device__ long long place(const Pages& pages, int block, int eighth, int slot) const {
        const int key = block * KEYS + 8 * eighth + slot;
        const int page = PAGE < KEYS ? 8 * eighth / PAGE : 0,
                  inside = PAGE < KEYS ? 8 * eighth % PAGE + slot : key & (PAGE - 1);
        const bool visible = static_cast<u32>(key - first) < static_cast<u32>(length - first);
        return visible ? place(pages.at[page], inside) : spare;
    }

    // Prefetches the pages (or parts of pages) of a block of keys to L2.
    __device__ void l2_prefetch_block(const Pages& pages, int block) const {
        constexpr int SPAN = PAGE < KEYS ? PAGE : KEYS;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) {
            const int key = block * KEYS + i * PAGE;
            if (key >= length || key + SPAN <= first) continue;
            const long long at = place(pages.at[i], PAGE < KEYS ? 0 : key & (PAGE - 1)) * DIM;
            l2_prefetch(w.k + at, 2 * DIM * SPAN), l2_prefetch(w.v + at, 2 * DIM * SPAN);
        }
    }

    __device__ void read(KeyTile& to, const Pages& pages, int block) const {
#pragma unroll
        for (int i = 0; i < 2 * KEY_TILES; ++i)
            read_row<4>(to.rows[i / 2][i % 2], w.k + place(pages, block, i, g) * DIM, p);
    }

    __device__ void read(Values& to, const Pages& pages, int block) const {
#pragma unroll
        for (int i = 0; i < 4 * KEY_TILES; ++i)
            read_row<8>(to.rows[i / 4][i % 4],
                        w.v + place(pages, block, i / 2, 2 * p + i % 2) * DIM, g);
    }
};

// Each lane's query fragment, two words per mma, in shared memory: reloading it per block of keys
// frees registers for keys in flight.
struct Query {
    uint2 words[RELOAD_QUERY ? STEPS : 1][32];
};

__device__ inline void store_query(Query& to, const u32 (&query)[KEY_WORDS]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        to.words[RELOAD_QUERY ? i : 0][threadIdx.x % 32] = {query[2 * i], query[2 * i + 1]};
}

__device__ inline uint2 reload_query(const uint2& words) {
    uint2 loaded;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(loaded.x), "=r"(loaded.y)
                 : "r"(shared_address(&words)));
    return loaded;
}

// QKᵀ of a tile: keys g (0, 1) and g + 8 (2, 3), heads 2 p and 2 p + 1.
__device__ inline void scores(float (&to)[4], const u32 (&keys)[2][KEY_WORDS],
                              const u32 (&query)[KEY_WORDS], const Query& query_smem) {
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // two accumulator chains to hide mma latency
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const uint2 right = RELOAD_QUERY ? reload_query(query_smem.words[i][threadIdx.x % 32])
                                         : uint2{query[2 * i], query[2 * i + 1]};
        mma(i % 2 == 0 ? to : odd, keys[0][2 * i], keys[1][2 * i], keys[0][2 * i + 1],
            keys[1][2 * i + 1], right.x, right.y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] += odd[i];
}

// Online softmax and O accumulators of heads 2 p and 2 p + 1.
struct Softmax {
    // over the warp; over this lane's keys
    float row_max[2] = {-1e30f, -1e30f}, row_sum[2] = {0.0f, 0.0f};
    // two channels per word for heads 2 p, 2 p + 1
    float acc[WORDS][4] = {};

    // score: −∞ for masked keys.
    __device__ void add(const Values& values, const float (&score)[KEY_TILES][4]) {
        float correction[2];
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float most = row_max[head];
#pragma unroll
            for (int t = 0; t < KEY_TILES; ++t)
                most = fmaxf(most, fmaxf(score[t][head], score[t][2 + head]));
#pragma unroll
            for (int by = 4; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
            correction[head] = exp2_fast(row_max[head] - most);
            row_max[head] = most, row_sum[head] *= correction[head];
        }
        const float from[2] = {row_max[0] - WEIGHT_EXPONENT, row_max[1] - WEIGHT_EXPONENT};
#pragma unroll
        for (int i = 0; i < 4 * WORDS; ++i) acc[i / 4][i % 4] *= correction[i % 2];
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) {
            u32 near[2], left[2];  // B operands: the rounded weights and their residuals
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float one = exp2_fast(score[t][2 * i] - from[0]);
                const float two = exp2_fast(score[t][2 * i + 1] - from[1]);
                const u32 pair = rounded_pair(one, two);
                row_sum[0] += one, row_sum[1] += two;
                near[i] = transpose_8x8(pair),
                left[i] = transpose_8x8(rounded_pair(one - low(pair), two - high(pair)));
            }
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const u32 a = values.rows[t][0][i], b = values.rows[t][1][i],
                          c = values.rows[t][2][i], d = values.rows[t][3][i];
                const u32 a0 = __byte_perm(a, b, 0x5410), a1 = __byte_perm(a, b, 0x7632);
                const u32 a2 = __byte_perm(c, d, 0x5410), a3 = __byte_perm(c, d, 0x7632);
                mma(acc[i], a0, a1, a2, a3, left[0], left[1]);
                mma(acc[i], a0, a1, a2, a3, near[0], near[1]);
            }
        }
    }
};

__device__ inline void store_warp(Parts<GROUP>& parts, Softmax& softmax, int warp, int g, int p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = 2 * p + i;
#pragma unroll
        for (int by = 4; by < 32; by *= 2)
            softmax.row_sum[i] += __shfl_xor_sync(~0u, softmax.row_sum[i], by);
        if (head >= GROUP) continue;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            float* to = &parts.acc[warp][head][channel(word, g)];
            to[0] = softmax.acc[word][i], to[1] = softmax.acc[word][2 + i];
        }
        if (g == 0) parts.stats[warp][head] = {softmax.row_max[i], softmax.row_sum[i]};
    }
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(SPLITS, 1, 1)
#endif
    __launch_bounds__(32 * WARPS, BLOCKS) paged_decode16(const __grid_constant__ Work w) {
    __shared__ Parts<GROUP> parts;
    auto [split, sequence, head, warp, g, p, row, rows, length, first, end, block] =
        share_of_lane<KEYS>(w, w.kv_heads);
    Reader reader = {
        w, w.tables + static_cast<long long>(sequence) * w.table_stride, head, first, length, g, p,
        0};
    Pages pages = reader.pages(block), next_pages = reader.pages(block + WARPS);
    const int last = max(length - 1, 0);
    reader.spare = reader.place(reader.table[min(last / PAGE, w.columns - 1)], last & (PAGE - 1));
    if (L2_PREFETCH > 0 && threadIdx.x % 32 == 0) {
        if (rows == 1 && block < end) reader.l2_prefetch_block(pages, block);
        if (L2_PREFETCH > 1 && rows == 1 && block + WARPS < end)
            reader.l2_prefetch_block(next_pages, block + WARPS);
    }
    if (w.pdl_at_start) pdl_launch_dependents();
    if (SPLITS > 1 && rows == 1) init_merge(parts, split);
    pdl_wait();
    if (!w.pdl_at_start) pdl_launch_dependents();
    if (rows != 1) return;
    KeyTile keys;
    if (block < end) reader.read(keys, pages, block);
    __shared__ Query query_smem;
    u32 query[KEY_WORDS] = {};  // this lane's B fragment: head g, in the keys' channel order
    if (g < GROUP && (!RELOAD_QUERY || warp == 0))
        read_row<4>(query,
                    w.q + static_cast<long long>(row) * w.q_stride + (head * GROUP + g) * w.q_head,
                    p);
    if (RELOAD_QUERY) {
        if (warp == 0) store_query(query_smem, query);
        __syncthreads();
    }
    Softmax softmax;
    for (; block < end; block += WARPS) {
        // The next keys are loaded during PV, into the registers of the current keys.
        Values values;
        reader.read(values, pages, block);
        pages = next_pages, next_pages = reader.pages(block + 2 * WARPS);
        float score[KEY_TILES][4];
#pragma unroll
        for (int t = 0; t < KEY_TILES; ++t) {
            scores(score[t], keys.rows[t], query, query_smem);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = block * KEYS + 16 * t + 8 * (i / 2) + g;
                // −∞
                score[t][i] = key >= first && key < length ? score[t][i] * w.scale
                                                           : __int_as_float(0xff800000);
            }
        }
        if (block + WARPS < end) reader.read(keys, pages, block + WARPS);
        softmax.add(values, score);
    }
    store_warp(parts, softmax, warp, g, p);
    u16* out = w.out + (static_cast<long long>(row) * w.kv_heads + head) * GROUP * DIM;
    join_and_store(parts, Output<SINKS>{out, w.sinks + head * GROUP, 1.0f, WEIGHT_EXPONENT}, split);
}
