// Decoding over pages of int8: one query a sequence, each head with keys and values of its own, in whole numbers.
//
// Keys go from memory to the tensor cores as they are, 16 of them the rows of an integer product; the query, times 2^22
// over its largest value, is three columns of it: its digits to the base 256. Values are turned, four keys by four
// channels at a time, so that channels are rows; the keys' weights, at most 1, are three digits of 8 bits again. Both sums
// are exact. Nothing is converted but sums: what bounds the kernel is memory alone.
//
// A value's scale is taken into its weight's exponent, so that no weight is above 1; the weights' own sum leaves it out.
//
// A block is WARPS warps, which take 32 keys of one sequence and head in turns, each with a softmax of its own. SPLITS
// blocks of a cluster share a context.
//
// Macros: DIM (64, 128), PAGE (8 … 128), SPLITS (1, 2, 4, 8), WARPS, BLOCKS (that registers are saved for on a
// multiprocessor), HALF (of q and out).
#include "mma.cuh"
#include "paged_decode.cuh"

constexpr int KEYS = 32, WORDS = DIM / 16, CHANNELS = DIM / 8, PAGES = PAGE < KEYS ? KEYS / PAGE : 1;
static_assert(DIM <= 32 * WARPS, "a thread has one value of the query");
constexpr float WHOLE = 4194304.0f, ONE = 16777215.0f; // what a query's largest value, and a weight of 1, become

struct Work {
    const u16 *q;
    const signed char *k, *v;
    const float *k_scale, *v_scale;
    const int *tables, *starts, *lengths;
    u16 *out;
    int heads, columns, table_stride, q_stride, q_head, window;
    float scale; // of scores, times log2(e)
};
static_assert(sizeof(Work) == 104, "paged_decode8.py packs 104 bytes");

__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// As mma.cuh's product of whole numbers, with B unsigned.
__device__ inline void values_product(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline float highest(float x) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, by));
    return x;
}

// The query's digits, highest first; a fourth row of nothing.
struct Query {
    signed char digits[4][DIM];
    float most[WARPS], poison[WARPS];
};

// Returns what a sum of whole numbers is to be multiplied with.
__device__ inline float split_query(Query &to, const u16 *q) {
    const int d = threadIdx.x;
    const float x = d < DIM ? value(q[d]) : 0.0f;
    float most = highest(fabsf(x)), poison = x * 0.0f; // what is no number stays none
#pragma unroll
    for (int by = 16; by > 0; by /= 2) poison += __shfl_xor_sync(~0u, poison, by);
    if (d % 32 == 0) to.most[d / 32] = most, to.poison[d / 32] = poison;
    __syncthreads();
    most = 1e-30f, poison = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = fmaxf(most, to.most[warp]), poison += to.poison[warp];
    if (d < DIM) {
        const int whole = __float2int_rn(x * (WHOLE / most));
        const int low = static_cast<signed char>(whole), rest = (whole - low) >> 8;
        const int middle = static_cast<signed char>(rest);
        to.digits[0][d] = (rest - middle) >> 8, to.digits[1][d] = middle, to.digits[2][d] = low, to.digits[3][d] = 0;
    }
    __syncthreads();
    return most / WHOLE + poison;
}

// What a lane reads of 32 keys: 16 bytes (or two times 16) of keys g, g + 8, g + 16, g + 24, the scales of key 8 p + g.
struct KeyTile {
    u32 rows[4][WORDS / 4][4];
    float scale, v_scale;
};

// And of the values CHANNELS bytes of keys 4 p … 4 p + 3 and 16 further.
struct Values {
    u32 rows[8][CHANNELS / 4];
};

struct Pages {
    int at[PAGES];
};

struct Reader {
    const Work &w;
    const int *table;
    int head, last; // column of the table that is the last
    int g, p;

    __device__ Pages pages(int block) const {
        Pages found;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) {
            const int column = PAGE < KEYS ? block * PAGES + i : block / (PAGE / KEYS);
            found.at[i] = table[min(column, last)];
        }
        return found;
    }

    // Of the key with this offset in a block, where it lies in the cache, in keys.
    __device__ long long place(const Pages &pages, int block, int page, int slot) const {
        const int inside = PAGE < KEYS ? slot : slot + block % (PAGE > KEYS ? PAGE / KEYS : 1) * KEYS;
        return (static_cast<long long>(pages.at[page]) * w.heads + head) * PAGE + inside;
    }

    __device__ void read(KeyTile &to, const Pages &pages, int block) const {
        // pages.at[] with an index that lanes differ in is a choice between registers
        long long own;
        if (PAGE >= KEYS)
            own = place(pages, block, 0, 8 * p + g);
        else if (PAGE == 16)
            own = p < 2 ? place(pages, block, 0, 8 * p + g) : place(pages, block, PAGES - 1, 8 * p + g - 16);
        else
            own = p < 2 ? (p == 0 ? place(pages, block, 0, g) : place(pages, block, PAGES > 1, g))
                        : (p == 2 ? place(pages, block, PAGES / 2, g) : place(pages, block, PAGES - 1, g));
        to.scale = w.k_scale[own], to.v_scale = w.v_scale[own];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int page = PAGE < KEYS ? 8 * r / PAGE : 0, slot = PAGE < KEYS ? 8 * r % PAGE + g : 8 * r + g;
            const signed char *at = w.k + place(pages, block, page, slot) * DIM + 16 * p;
#pragma unroll
            for (int c = 0; c < WORDS / 4; ++c) load_streaming(to.rows[r][c], at + 64 * c);
        }
    }

    __device__ void read(Values &to, const Pages &pages, int block) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            long long first;
            if (PAGE >= KEYS)
                first = place(pages, block, 0, 16 * half + 4 * p);
            else if (PAGE == 16)
                first = place(pages, block, half * (PAGES - 1), 4 * p);
            else
                first = p < 2 ? place(pages, block, half * (PAGES / 2), 4 * p)
                              : place(pages, block, half * (PAGES / 2) + (PAGES > 1), 4 * p - 8);
            const signed char *at = w.v + first * DIM + CHANNELS * g;
#pragma unroll
            for (int i = 0; i < 4; ++i) load_streaming(to.rows[4 * half + i], at + i * DIM);
        }
    }
};

// The bytes of four words, turned: word b of the result has byte b of each.
__device__ inline void turned(u32 (&to)[4], u32 a, u32 b, u32 c, u32 d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const u32 above_ab = __byte_perm(a, b, 0x7362), above_cd = __byte_perm(c, d, 0x7362);
    to[0] = __byte_perm(ab, cd, 0x5410), to[1] = __byte_perm(ab, cd, 0x7632);
    to[2] = __byte_perm(above_ab, above_cd, 0x5410), to[3] = __byte_perm(above_ab, above_cd, 0x7632);
}

struct Softmax {
    float top = -1e30f, mass = 0.0f; // of the warp; of this lane's keys
    float mixed[CHANNELS] = {};      // of channels CHANNELS g …: its higher digits (p = 0), its lowest (p = 1)

    // Whole scores of the keys: lane 4 g + p gets that of key 8 p + g.
    __device__ static float scores(const KeyTile &keys, const u32 (&query)[WORDS], int p) {
        const float high = p == 0 ? 65536.0f : p == 1 ? 1.0f : 0.0f, low = p == 0 ? 256.0f : 0.0f;
        float sum[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < WORDS; i += 2)
                multiply(d, keys.rows[2 * half][i / 4][i % 4], keys.rows[2 * half + 1][i / 4][i % 4],
                             keys.rows[2 * half][i / 4][i % 4 + 1], keys.rows[2 * half + 1][i / 4][i % 4 + 1],
                             query[i], query[i + 1]);
            sum[2 * half] = static_cast<float>(d[0]) * high + static_cast<float>(d[1]) * low;
            sum[2 * half + 1] = static_cast<float>(d[2]) * high + static_cast<float>(d[3]) * low;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        const float mine = p == 0 ? sum[0] : sum[1];
        const float others = __shfl_xor_sync(~0u, p == 0 ? sum[2] : sum[3], 2);
        return p < 2 ? mine : others;
    }

    // score: of this lane's key, −∞ where it is not seen; value_scale then 1.
    __device__ void add(const Values &values, float score, float value_scale, int g, int p) {
        const float weighed = score + log2_fast(value_scale);
        const float most = fmaxf(top, highest(weighed)), keep = exp2_fast(top - most);
        top = most;
        mass = mass * keep + exp2_fast(score - most);
        const u32 weight = __float2uint_rn(exp2_fast(weighed - most) * ONE);
        // This lane's share of a right operand: digit g of the weights of keys 4 p …, 16 + 4 p …
        const u32 digit = g < 3 ? 2 - g : 3, pick = digit | (4 + digit) << 4;
        u32 right[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = __shfl_sync(~0u, weight, (p % 2 * 4 + i) * 4 + 2 * half + p / 2);
            right[half] = __byte_perm(__byte_perm(four[0], four[1], pick), __byte_perm(four[2], four[3], pick), 0x5410);
        }
        const int above = p == 0 ? 256 : 1;
        const float unit = p == 0 ? 256.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < CHANNELS / 4; ++j) {
            u32 near[4], far[4];
            turned(near, values.rows[0][j], values.rows[1][j], values.rows[2][j], values.rows[3][j]);
            turned(far, values.rows[4][j], values.rows[5][j], values.rows[6][j], values.rows[7][j]);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int d[4] = {0, 0, 0, 0};
                values_product(d, near[i], near[i + 1], far[i], far[i + 1], right[0], right[1]);
                float &first = mixed[4 * j + i], &second = mixed[4 * j + i + 1];
                first = fmaf(static_cast<float>(d[0] * above + d[1]), unit, first * keep);
                second = fmaf(static_cast<float>(d[2] * above + d[3]), unit, second * keep);
            }
        }
    }
};

__device__ inline void store_warp(Parts<1> &found, Softmax &mine, int warp, int g, int p) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) mine.mass += __shfl_xor_sync(~0u, mine.mass, by);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        mine.mixed[i] += __shfl_xor_sync(~0u, mine.mixed[i], 1);
        if (p == 0) found.mixed[warp][0][CHANNELS * g + i] = mine.mixed[i];
    }
    if (threadIdx.x % 32 == 0) found.top[warp][0] = mine.top, found.mass[warp][0] = mine.mass;
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(SPLITS, 1, 1)
#endif
__launch_bounds__(32 * WARPS, BLOCKS)
    paged_decode8(const __grid_constant__ Work w) {
    __shared__ Parts<1> found;
    __shared__ __align__(16) Query digits;
    const int split = SPLITS > 1 ? cluster_rank() : 0, pair = blockIdx.x / SPLITS;
    const int sequence = pair / w.heads, head = pair - sequence * w.heads;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, p = threadIdx.x % 4;
    const int row = w.starts[sequence], rows = w.starts[sequence + 1] - row, length = w.lengths[sequence];
    const int first = w.window > 0 ? max(length - w.window, 0) : 0; // keys that the query sees: first … length − 1
    const int begin = first / KEYS, blocks = (length + KEYS - 1) / KEYS - begin, each = (blocks + SPLITS - 1) / SPLITS;
    const int end = begin + min((split + 1) * each, blocks);
    int block = begin + split * each + warp;
    const Reader reader = {w, w.tables + static_cast<long long>(sequence) * w.table_stride, head,
                           min(max(length - 1, 0) / PAGE, w.columns - 1), g, p};
    Pages pages = reader.pages(block), pages_behind = reader.pages(block + WARPS);
    pdl_wait();
    pdl_launch_dependents();
    if (rows != 1) return;
    KeyTile keys;
    if (block < end) reader.read(keys, pages, block);
    const u16 *q = w.q + static_cast<long long>(row) * w.q_stride + head * w.q_head;
    const float scale = w.scale * split_query(digits, q);
    u32 query[WORDS]; // this lane's share of a right operand: of channels 64 (i / 4) + 16 p + 4 (i % 4) …, i a word
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        query[i] = *reinterpret_cast<const u32 *>(&digits.digits[min(g, 3)][64 * (i / 4) + 16 * p + 4 * (i % 4)]);
    Softmax mine;
    for (; block < end; block += WARPS) {
        // The next keys are on their way beside these values, in the registers that these keys leave.
        Values values;
        reader.read(values, pages, block);
        pages = pages_behind, pages_behind = reader.pages(block + 2 * WARPS);
        const int key = block * KEYS + 8 * p + g;
        const bool seen = key >= first && key < length;
        const float whole = mine.scores(keys, query, p) * scale;
        const float score = seen ? whole * keys.scale : __int_as_float(0xff800000); // −∞
        const float value_scale = seen ? keys.v_scale : 1.0f;
        if (block + WARPS < end) reader.read(keys, pages, block + WARPS);
        mine.add(values, score, value_scale, g, p);
    }
    store_warp(found, mine, warp, g, p);
    __syncthreads();
    join_warps(found);
    if (SPLITS > 1)
        cluster_sync();
    else
        __syncthreads();
    finish(found, w.out + (static_cast<long long>(row) * w.heads + head) * DIM, split, ONE);
    if (SPLITS > 1) cluster_sync(); // a block that ended could not be read
}
