// Decode attention over int8 KV pages in integer arithmetic, bound by memory bandwidth.
//
// Computes: out[B, heads · DIM] for one query q[B, heads, DIM] per sequence; one KV head per query
//     head (no GQA)
// Dtypes: q and out bfloat16 or float16; KV pages int8 with a float32 scale per token and head
// Layout: K and V pages [pages, kv_heads, PAGE, DIM]; int32 page tables
// Range: decode, int8 pages; DIM 64 or 128, PAGE 8 … 128 (a power of two), heads = kv_heads
// Technique: int8 mma.sync m16n8k32, split-KV over a thread-block cluster (DSMEM), PDL
// Ops: paged_attention (launched by paged_decode8.py)
//
// QKᵀ: 16 keys are the rows (A) of the int8 mma.m16n8k32 as loaded; the query, scaled to 2^22 /
// amax, is three columns (its base-256 digits). PV: values are transposed four keys by four
// channels, so that channels are the rows; the weights (at most 1) are three 8-bit digits. Both
// integer sums are exact; only sums are converted to float. A value's scale is folded into its
// weight's exponent, so that no weight exceeds 1; row_sum excludes it.
//
// A block has WARPS warps, each with 32 keys at a time of one sequence and head and its own online
// softmax. SPLITS blocks of a cluster share a context (split-KV) and merge through DSMEM.
//
// Macros: DIM (64, 128), PAGE (8 … 128), SPLITS (1, 2, 4, 8), WARPS, BLOCKS (per SM, for
// __launch_bounds__), HALF (type of q and out).
#include "common/mma.cuh"
#include "attention/paged_decode.cuh"

constexpr int KEYS = 32, WORDS = DIM / 16, CHANNELS = DIM / 8,
              PAGES = PAGE < KEYS ? KEYS / PAGE : 1;
static_assert(DIM <= 32 * WARPS, "each thread holds at most one channel of the query");
// integers for a query's amax and for a weight of 1
constexpr float QUERY_SCALE = 4194304.0f, UNIT_WEIGHT = 16777215.0f;

struct Work {
    const u16* q;
    const signed char *k, *v;
    const float *k_scale, *v_scale;
    const int *tables, *starts, *lengths;
    u16* out;
    int heads, columns, table_stride, q_stride, q_head, window;
    float scale;  // of scores, times log2(e)
};
static_assert(sizeof(Work) == 104, "paged_decode8.py packs 104 bytes");

__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The int8 mma of mma.cuh with unsigned B.
__device__ inline void mma_s8u8(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The query's base-256 digits, highest first; the fourth row is zero.
struct Query {
    signed char digits[4][DIM];
    float most[WARPS], poison[WARPS];
};

// Splits the query into digits. Returns the factor from integer sums to scores.
__device__ inline float split_query(Query& to, const u16* q) {
    const int d = threadIdx.x;
    const float x = d < DIM ? to_float(q[d]) : 0.0f;
    float most = warp_max(fabsf(x)), poison = x * 0.0f;  // propagates NaN and infinity
#pragma unroll
    for (int by = 16; by > 0; by /= 2) poison += __shfl_xor_sync(~0u, poison, by);
    if (d % 32 == 0) to.most[d / 32] = most, to.poison[d / 32] = poison;
    __syncthreads();
    most = 1e-30f, poison = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp)
        most = fmaxf(most, to.most[warp]), poison += to.poison[warp];
    if (d < DIM) {
        const int whole = __float2int_rn(x * (QUERY_SCALE / most));
        const int low = static_cast<signed char>(whole), rest = (whole - low) >> 8;
        const int middle = static_cast<signed char>(rest);
        to.digits[0][d] = (rest - middle) >> 8, to.digits[1][d] = middle, to.digits[2][d] = low,
        to.digits[3][d] = 0;
    }
    __syncthreads();
    return most / QUERY_SCALE + poison;
}

// A lane's registers per 32 keys: 16 bytes (or twice 16) of keys g, g + 8, g + 16, g + 24; the
// scales of key 8 p + g.
struct KeyTile {
    u32 rows[4][WORDS / 4][4];
    float scale, v_scale;
};

// Values: CHANNELS bytes of keys 4 p … 4 p + 3 and of those + 16.
struct Values {
    u32 rows[8][CHANNELS / 4];
};

struct Pages {
    int at[PAGES];
};

struct Reader {
    const Work& w;
    const int* table;
    int head, last;  // last column of the table
    int g, p;

    __device__ Pages pages(int block) const {
        Pages result;
#pragma unroll
        for (int i = 0; i < PAGES; ++i) {
            const int column = PAGE < KEYS ? block * PAGES + i : block / (PAGE / KEYS);
            result.at[i] = table[min(column, last)];
        }
        return result;
    }

    // Cache position of slot `slot` of a block's page `page`, in units of keys.
    __device__ long long place(const Pages& pages, int block, int page, int slot) const {
        const int inside =
            PAGE < KEYS ? slot : slot + block % (PAGE > KEYS ? PAGE / KEYS : 1) * KEYS;
        return (static_cast<long long>(pages.at[page]) * w.heads + head) * PAGE + inside;
    }

    __device__ void read(KeyTile& to, const Pages& pages, int block) const {
        // pages.at[] with a lane-dependent index would be spilled; select between registers instead
        long long own;
        if (PAGE >= KEYS)
            own = place(pages, block, 0, 8 * p + g);
        else if (PAGE == 16)
            own = p < 2 ? place(pages, block, 0, 8 * p + g)
                        : place(pages, block, PAGES - 1, 8 * p + g - 16);
        else
            own = p < 2 ? (p == 0 ? place(pages, block, 0, g) : place(pages, block, PAGES > 1, g))
                        : (p == 2 ? place(pages, block, PAGES / 2, g)
                                  : place(pages, block, PAGES - 1, g));
        to.scale = w.k_scale[own], to.v_scale = w.v_scale[own];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int page = PAGE < KEYS ? 8 * r / PAGE : 0,
                      slot = PAGE < KEYS ? 8 * r % PAGE + g : 8 * r + g;
            const signed char* at = w.k + place(pages, block, page, slot) * DIM + 16 * p;
#pragma unroll
            for (int c = 0; c < WORDS / 4; ++c) load_streaming(to.rows[r][c], at + 64 * c);
        }
    }

    __device__ void read(Values& to, const Pages& pages, int block) const {
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
            const signed char* at = w.v + first * DIM + CHANNELS * g;
#pragma unroll
            for (int i = 0; i < 4; ++i) load_streaming(to.rows[4 * half + i], at + i * DIM);
        }
    }
};

// 4 x 4 byte transpose: word b of the result has byte b of each word.
__device__ inline void transpose_bytes(u32 (&to)[4], u32 a, u32 b, u32 c, u32 d) {
    const u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const u32 above_ab = __byte_perm(a, b, 0x7362), above_cd = __byte_perm(c, d, 0x7362);
    to[0] = __byte_perm(ab, cd, 0x5410), to[1] = __byte_perm(ab, cd, 0x7632);
    to[2] = __byte_perm(above_ab, above_cd, 0x5410),
    to[3] = __byte_perm(above_ab, above_cd, 0x7632);
}

struct Softmax {
    float row_max = -1e30f, row_sum = 0.0f;  // over the warp; over this lane's keys
    // channels CHANNELS g …: higher digits (p = 0), lowest digit (p = 1)
    float acc[CHANNELS] = {};

    // Integer QKᵀ: lane 4 g + p gets the score of key 8 p + g.
    __device__ static float scores(const KeyTile& keys, const u32 (&query)[WORDS], int p) {
        const float high = p == 0 ? 65536.0f : p == 1 ? 1.0f : 0.0f, low = p == 0 ? 256.0f : 0.0f;
        float sum[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int d[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < WORDS; i += 2)
                mma(d, keys.rows[2 * half][i / 4][i % 4], keys.rows[2 * half + 1][i / 4][i % 4],
                    keys.rows[2 * half][i / 4][i % 4 + 1],
                    keys.rows[2 * half + 1][i / 4][i % 4 + 1], query[i], query[i + 1]);
            sum[2 * half] = static_cast<float>(d[0]) * high + static_cast<float>(d[1]) * low;
            sum[2 * half + 1] = static_cast<float>(d[2]) * high + static_cast<float>(d[3]) * low;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        const float mine = p == 0 ? sum[0] : sum[1];
        const float others = __shfl_xor_sync(~0u, p == 0 ? sum[2] : sum[3], 2);
        return p < 2 ? mine : others;
    }

    // score: of this lane's key, −∞ if masked (value_scale is then 1).
    __device__ void add(const Values& values, float score, float value_scale, int g, int p) {
        const float weighed = score + log2_fast(value_scale);
        const float most = fmaxf(row_max, warp_max(weighed)),
                    correction = exp2_fast(row_max - most);
        row_max = most;
        row_sum = row_sum * correction + exp2_fast(score - most);
        const u32 weight = __float2uint_rn(exp2_fast(weighed - most) * UNIT_WEIGHT);
        // This lane's B fragment: digit g of the weights of keys 4 p …, 16 + 4 p …
        const u32 digit = g < 3 ? 2 - g : 3, pick = digit | (4 + digit) << 4;
        u32 right[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                four[i] = __shfl_sync(~0u, weight, (p % 2 * 4 + i) * 4 + 2 * half + p / 2);
            right[half] = __byte_perm(__byte_perm(four[0], four[1], pick),
                                      __byte_perm(four[2], four[3], pick), 0x5410);
        }
        const int above = p == 0 ? 256 : 1;
        const float unit = p == 0 ? 256.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < CHANNELS / 4; ++j) {
            u32 near[4], far[4];
            transpose_bytes(near, values.rows[0][j], values.rows[1][j], values.rows[2][j],
                            values.rows[3][j]);
            transpose_bytes(far, values.rows[4][j], values.rows[5][j], values.rows[6][j],
                            values.rows[7][j]);
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int d[4] = {0, 0, 0, 0};
                mma_s8u8(d, near[i], near[i + 1], far[i], far[i + 1], right[0], right[1]);
                float &first = acc[4 * j + i], &second = acc[4 * j + i + 1];
                first = fmaf(static_cast<float>(d[0] * above + d[1]), unit, first * correction);
                second = fmaf(static_cast<float>(d[2] * above + d[3]), unit, second * correction);
            }
        }
    }
};

__device__ inline void store_warp(Parts<1>& parts, Softmax& softmax, int warp, int g, int p) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) softmax.row_sum += __shfl_xor_sync(~0u, softmax.row_sum, by);
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
        softmax.acc[i] += __shfl_xor_sync(~0u, softmax.acc[i], 1);
        if (p == 0) parts.acc[warp][0][CHANNELS * g + i] = softmax.acc[i];
    }
    if (threadIdx.x % 32 == 0) parts.stats[warp][0] = {softmax.row_max, softmax.row_sum};
}

extern "C" __global__ void
#if SPLITS > 1
__cluster_dims__(SPLITS, 1, 1)
#endif
    __launch_bounds__(32 * WARPS, BLOCKS) paged_decode8(const __grid_constant__ Work w) {
    __shared__ Parts<1> parts;
    __shared__ __align__(16) Query digits;
    auto [split, sequence, head, warp, g, p, row, rows, length, first, end, block] =
        share_of_lane<KEYS>(w, w.heads);
    const Reader reader = {w,    w.tables + static_cast<long long>(sequence) * w.table_stride,
                           head, min(max(length - 1, 0) / PAGE, w.columns - 1),
                           g,    p};
    Pages pages = reader.pages(block), next_pages = reader.pages(block + WARPS);
    if (rows == 1) init_merge(parts, split);
    pdl_wait();
    pdl_launch_dependents();
    if (rows != 1) return;
    KeyTile keys;
    if (block < end) reader.read(keys, pages, block);
    const u16* q = w.q + static_cast<long long>(row) * w.q_stride + head * w.q_head;
    const float scale = w.scale * split_query(digits, q);
    // this lane's B fragment: word i has channels 64 (i / 4) + 16 p + 4 (i % 4) …
    u32 query[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        query[i] = *reinterpret_cast<const u32*>(
            &digits.digits[min(g, 3)][64 * (i / 4) + 16 * p + 4 * (i % 4)]);
    Softmax softmax;
    for (; block < end; block += WARPS) {
        // The next keys are loaded during PV, into the registers of the current keys.
        Values values;
        reader.read(values, pages, block);
        pages = next_pages, next_pages = reader.pages(block + 2 * WARPS);
        const int key = block * KEYS + 8 * p + g;
        const bool visible = key >= first && key < length;
        const float whole = softmax.scores(keys, query, p) * scale;
        const float score = visible ? whole * keys.scale : __int_as_float(0xff800000);  // −∞
        const float value_scale = visible ? keys.v_scale : 1.0f;
        if (block + WARPS < end) reader.read(keys, pages, block + WARPS);
        softmax.add(values, score, value_scale, g, p);
    }
    store_warp(parts, softmax, warp, g, p);
    u16* out = w.out + (static_cast<long long>(row) * w.heads + head) * DIM;
    join_and_store(parts, Output<false>{out, nullptr, UNIT_WEIGHT, 0.0f}, split);
}
