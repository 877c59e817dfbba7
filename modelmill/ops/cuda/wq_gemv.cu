// Products of one row of x with 4- or 8-bit weights through the 8-bit tensor cores, as fast as the weights come from
// memory.
//
// x is made whole numbers: 128 columns (a piece) share a power of two, and each value is up to four signed digits of base
// 256 ("planes"), 27 or 31 bits below the piece's largest. A right operand has eight columns, and one row of x would fill
// one: the planes fill four, and cost nothing. What it saves is all of the weights' conversion. Of 4-bit codes the product
// takes a word as it is and once more with its upper halves masked away:
//     low · x_low + high · x_high = low · (x_low − x_high / 16) + byte · (x_high / 16).
// x in integers (INTEGER) is one plane, or two with 4-bit weights. Sums of a piece are whole numbers below 2^22.
//
// The left operand is four words of one row of the weight, as one load brings them to a thread: the hardware takes the
// second and the fourth for another row, eight below. So of the right operand's columns four hold what the first and the
// third word are multiplied with, and four what the second and the fourth: one half of the result for each is what counts.
// Where a piece of 4-bit weights has several groups (GROUPS 2 or 4: 64 or 32 columns) the other four columns are another
// group's; two rows of the weight go into one operand then, and words are moved for it. Of 8-bit weights each of a row's two
// loads has groups of its own: they are products apart, and groups of 32 columns two more, with other threads' columns as 0.
//
// A block stays on its multiprocessor and takes 16 rows of the weight (a tile) after another. A warp has its own parts of
// all rows, 128 bytes wide (lines), and its own ring in shared memory: it asks the copy engine for a line as soon as it is
// done with another, and waits for nobody. The ring is full before x is there. The last warp to be done with a tile adds up.
//
// The copy engine's 128-byte swizzle puts 16-byte cell c of row r at c ^ (r % 8). A thread's rows are such that the eight
// threads that are served at once read eight different groups of banks.
//
// Macros: BITS (of a weight), GROUPS (of a piece: 1, 2, 4), INTEGER, GATED (eight rows of a tile are of the gate, the
// others the same of the half below), OFFSET, WIDE (scales are float32), WARPS, STAGES (of a warp's ring), HELD (tiles whose
// scales and sums are in shared memory), SINGLE (a warp has at most one line of a row: x stays in registers), TOGETHER
// (a line's scales, two of 16 bits or four, are read at once), FLOAT or HALF (the output's type).
#include "weight_only_types.cuh"
#include "digit_planes.cuh"

constexpr int ROWS = 16;
constexpr int PIECES = 8 / BITS;                    // of a line
constexpr bool MIXED = BITS == 4 && GROUPS > 1;     // two rows in one operand
constexpr int B_WORDS = MIXED ? 8 : 4;              // of x that a thread multiplies a piece with
constexpr u32 LINE = ROWS * 128;
constexpr int PLANES = INTEGER ? PIECES : 4;
constexpr int DEEP = BITS == 4 ? 26 : 30; // bits of the largest value of a piece
constexpr int AT_ONCE = SINGLE ? 1 : 3;   // lines of x that a warp loads before it looks at one
static_assert(GROUPS == 1 || !INTEGER, "threads hold different groups' columns");
constexpr int SLOTS = PIECES * GROUPS;              // groups of a line
static_assert(!TOGETHER || (!MIXED && !WIDE && SLOTS > 1), "a line's scales of 16 bits are a word or two");
constexpr bool SUMS = BITS == 4 || OFFSET; // bytes have signs, codes of 4 bits have 8 to be taken away

struct Work {
    const void *x;               // [K], 16 bits, or int8
    const ScaleT *scale, *offset;  // [N, groups]
    const float *step;           // [groups], integers alone
    const float *constant;       // [N] or null
    const Out *bias;             // [N] or null
    Out *out;
    int rows, columns, groups;
    int shift; // pieces that share a scale, as a power of two
    int tiles, lines;
};

extern __shared__ __align__(1024) unsigned char shared[];

static_assert(sizeof(Work) == 80, "wq_gemv.py packs 80 bytes");

struct Barriers {
    u64 full[WARPS][STAGES], scales[HELD];
    u32 count[HELD];
};

// Where things lie in shared memory, in bytes: the warps' rings, then what has a size that is known, then the rest.
constexpr u32 BARRIERS = WARPS * STAGES * LINE, KEPT = BARRIERS + (sizeof(Barriers) + 15) / 16 * 16;
constexpr u32 ENTRIES = KEPT + HELD * WARPS * ROWS * 4; // sums [HELD][WARPS][ROWS] end here

struct SharedLayout {
    u32 x;     // [pieces][2][PLANES][4] cells of 16 columns; how those lie: store_planes
    u32 steps; // [pieces][2] float32: of the lower two planes, of the upper two
    u32 sums;  // [pieces][GROUPS] float32
    u32 grids; // [HELD][scales of ROWS rows, offsets]
};

template <typename T>
__device__ inline T &shared_at(u32 place) {
    return *reinterpret_cast<T *>(shared + place);
}

__device__ inline u32 full_of(int warp, int stage) {
    return shared_address(shared) + BARRIERS + (warp * STAGES + stage) * 8;
}

__device__ inline u32 scales_full(int slot) { return shared_address(shared) + BARRIERS + (WARPS * STAGES + slot) * 8; }

__device__ inline SharedLayout shared_layout(const Work &w) {
    const u32 pieces = w.lines * PIECES;
    const u32 steps = ENTRIES + pieces * PLANES * 128, sums = steps + 8 * pieces;
    return {ENTRIES, steps, sums, (sums + (SUMS ? 4 * pieces * GROUPS : 0) + 15) / 16 * 16};
}

// First row in memory of half a tile: rows 0 … 7 or 8 … 15.
__device__ inline int first_row(const Work &w, int tile, int half) {
    return GATED ? tile * 8 + half * (w.rows / 2) : tile * 16 + half * 8;
}

// By one thread.
__device__ inline void load_scales(const Work &w, const SharedLayout &to, int tile, int slot) {
    const u32 each = 8 * w.groups * sizeof(ScaleT), full = scales_full(slot);
    const u32 target = shared_address(shared) + to.grids + slot * (OFFSET ? 4 : 2) * each;
    mbarrier_arrive_expect_tx(full, each * (OFFSET ? 4 : 2));
    for (int half = 0; half < 2; ++half) {
        const long long at = static_cast<long long>(first_row(w, tile, half)) * w.groups;
        bulk_load(target + half * each, w.scale + at, each, full);
        if (OFFSET) bulk_load(target + (2 + half) * each, w.offset + at, each, full);
    }
}

// The line that a warp asks for next; by one thread. What lies behind a row's end is brought as zeros.
struct NextLine {
    int tile, line, stage;
};

__device__ inline void load_line(const TensorMap &map, const Work &w, NextLine &next) {
    if (next.tile < w.tiles) {
        const u32 warp = threadIdx.x / 32, full = full_of(warp, next.stage);
        const u32 target = shared_address(shared) + (warp * STAGES + next.stage) * LINE;
        mbarrier_arrive_expect_tx(full, LINE);
        if (GATED) {
            tma_load(target, map, full, next.line * 32, next.tile * 8, 0); // of both halves
        } else {
            tma_load(target, map, full, next.line * 32, next.tile * 16);
        }
    }
    if (++next.stage == STAGES) next.stage = 0;
    next.line += WARPS;
    if (next.line >= w.lines) next.line = threadIdx.x / 32, next.tile += gridDim.x;
}

// Byte i of four words, side by side, for each i.
__device__ inline void transpose(const u32 (&from)[4], u32 (&to)[4]) {
    const u32 a = __byte_perm(from[0], from[1], 0x5140), b = __byte_perm(from[2], from[3], 0x5140);
    const u32 c = __byte_perm(from[0], from[1], 0x7362), d = __byte_perm(from[2], from[3], 0x7362);
    to[0] = __byte_perm(a, b, 0x5410), to[1] = __byte_perm(a, b, 0x7632);
    to[2] = __byte_perm(c, d, 0x5410), to[3] = __byte_perm(c, d, 0x7632);
}

// Four whole numbers to the planes of a piece: columns 4 · lane …
__device__ inline void store_planes(const SharedLayout &to, int number, int (&whole)[4], int lane) {
    if (BITS == 4) { // lower halves of a run's bytes are its columns 0 … 15, upper ones 16 … 31
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int upper = __shfl_down_sync(~0u, whole[i], 4);
            if (lane % 8 < 4) whole[i] = 16 * whole[i] - upper;
        }
    }
    u32 digits[4], planes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) digits[i] = (static_cast<u32>(whole[i]) + 0x00808080u) ^ 0x00808080u;
    transpose(digits, planes);
    // a thread of place p multiplies words 0 … 3 of its two loads, or of their lower and upper halves
    const int half = BITS == 4 ? lane / 4 % 2 : lane / 16, place = BITS == 4 ? lane / 8 : lane / 4 % 4, word = lane % 4;
    const int cell = MIXED ? half : word % 2, at = MIXED ? word : half * 2 + word / 2;
    const u32 first = to.x + number * PLANES * 128 + (cell * PLANES * 4 + place) * 16 + at * 4;
#pragma unroll
    for (int n = 0; n < PLANES; ++n) shared_at<u32>(first + n * 64) = planes[n];
}

// The sum of 128 / GROUPS columns, of which this thread has four, by the first thread of each.
__device__ inline void store_sum(const SharedLayout &to, int number, float sum, int lane) {
#pragma unroll
    for (int by = 16 / GROUPS; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane % (32 / GROUPS) == 0) shared_at<float>(to.sums + 4 * (number * GROUPS + lane / (32 / GROUPS))) = sum;
}

// Columns of x in 16 bits.
__device__ inline void stage_numbers(const SharedLayout &to, int number, uint2 four, int lane) {
    const u32 a = four.x & 0x7FFF7FFFu, b = four.y & 0x7FFF7FFFu;
    const u32 most = __reduce_max_sync(~0u, max(max(a & 0xFFFF, a >> 16), max(b & 0xFFFF, b >> 16)));
    const u32 largest = __float_as_uint(value(static_cast<u16>(most))) >> 23;
    const u32 exponent = max(largest, 31u); // below, values are 0 at any precision
    const float up = __uint_as_float((253 + DEEP - exponent) << 23);
    const float values[4] = {value(four.x & 0xFFFF), value(four.x >> 16), value(four.y & 0xFFFF),
                             value(four.y >> 16)};
    int whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) whole[i] = __float2int_rn(values[i] * up);
    store_planes(to, number, whole, lane);
    if (lane == 0) {
        const u32 bits = (exponent + 1 - DEEP - (BITS == 4 ? 4 : 0)) << 23;
        const float step = __uint_as_float(largest == 255 ? 0x7FC00000u : bits); // what is no number stays none
        shared_at<float2>(to.steps + 8 * number) = {step, 65536.0f * step};
    }
    if (SUMS) store_sum(to, number, (values[0] + values[1]) + (values[2] + values[3]), lane);
}

// Columns of integers.
__device__ inline void stage_integers(const Work &w, const SharedLayout &to, int number, u32 four, int lane) {
    const float step = w.step[min(number >> w.shift, w.groups - 1)];
    int whole[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) whole[i] = static_cast<int>(four << (24 - 8 * i)) >> 24;
    store_planes(to, number, whole, lane);
    if (lane == 0) shared_at<float2>(to.steps + 8 * number) = {BITS == 4 ? 0.0625f * step : step, 0.0f};
    if (SUMS) store_sum(to, number, step * static_cast<float>(__dp4a(static_cast<int>(four), 0x01010101, 0)), lane);
}

// What this warp will multiply with, by itself.
__device__ inline void stage_x(const Work &w, const SharedLayout &to) {
    const int lane = threadIdx.x % 32;
    for (int line = threadIdx.x / 32; line < w.lines; line += AT_ONCE * WARPS) {
        uint2 got[AT_ONCE][PIECES];
#pragma unroll
        for (int i = 0; i < AT_ONCE * PIECES; ++i) { // none beyond the last line: there are no columns
            const int column = ((line + i / PIECES * WARPS) * PIECES + i % PIECES) * 128 + 4 * lane;
            uint2 &four = got[i / PIECES][i % PIECES];
            four = {0, 0};
            if (column < w.columns) {
                if (INTEGER) {
                    four.x = static_cast<const u32 *>(w.x)[column / 4];
                } else {
                    four = static_cast<const uint2 *>(w.x)[column / 4];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE * PIECES; ++i) {
            const int mine = line + i / PIECES * WARPS, number = mine * PIECES + i % PIECES;
            if (mine >= w.lines) break;
            if (INTEGER) {
                stage_integers(w, to, number, got[i / PIECES][i % PIECES].x, lane);
            } else {
                stage_numbers(to, number, got[i / PIECES][i % PIECES], lane);
            }
        }
    }
    __syncwarp();
}

// The planes of a piece that a thread multiplies with, those of column lane / 4 of the right operand.
__device__ inline void planes_of(u32 (&b)[B_WORDS], const SharedLayout &to, int number, int lane) {
    const int quad = lane / 4, place = lane % 4, plane = quad % 4;
    const u32 piece = to.x + number * PLANES * 128;
    uint4 got = {0, 0, 0, 0};
    if (!MIXED) {
        if (plane < PLANES) got = shared_at<uint4>(piece + ((quad / 4 * PLANES + plane) * 4 + place) * 16);
        b[0] = got.x, b[1] = got.y, b[2] = got.z, b[3] = got.w;
        return;
    }
    const bool mine = GROUPS == 2 ? place / 2 == quad / 4 : place % 2 == quad / 4;
#pragma unroll
    for (int half = 0; half < B_WORDS / 4; ++half) {
        if (mine) got = shared_at<uint4>(piece + ((half * PLANES + plane) * 4 + place) * 16);
        b[4 * half] = got.x, b[4 * half + 1] = got.y, b[4 * half + 2] = got.z, b[4 * half + 3] = got.w;
    }
}

// Sums of two planes together: below 2^31.
__device__ inline float combine_planes(int lower, int upper) { return static_cast<float>(256 * upper + lower); }

struct Sums {
    float low, high; // of this thread's two rows, some of their columns and planes
    float offsets;   // of row lane % 16
};

struct Scales {
    float low, high;
};

__device__ inline Scales scales_of(const Work &w, u32 grid, int group) {
    const u32 at = grid + min(group, w.groups - 1) * sizeof(ScaleT);
    return {scale_to_float(shared_at<ScaleT>(at)), scale_to_float(shared_at<ScaleT>(at + 8 * w.groups * sizeof(ScaleT)))};
}

__device__ inline void add(Sums &sums, float low, float high, Scales by, float step) {
    sums.low = fmaf(by.low * step, low, sums.low);
    sums.high = fmaf(by.high * step, high, sums.high);
}

struct Four {
    u32 word[4];
};

__device__ inline Four four(uint4 from) { return {{from.x, from.y, from.z, from.w}}; }

__device__ inline Four masked(Four from) {
    return {{from.word[0] & 0x0F0F0F0Fu, from.word[1] & 0x0F0F0F0Fu, from.word[2] & 0x0F0F0F0Fu, from.word[3] & 0x0F0F0F0Fu}};
}

__device__ inline void multiply(int (&d)[4], const Four &a, u32 b0, u32 b1) {
    mma_int8(d, a.word[0], a.word[1], a.word[2], a.word[3], b0, b1);
}

// One row in a piece of one group: two loads of 8-bit weights, or one of 4-bit ones as it is and masked.
__device__ inline float row_part(const Four &first, const Four &second, const u32 (&b)[B_WORDS], bool upper) {
    int d[4] = {0, 0, 0, 0};
    multiply(d, BITS == 4 ? masked(first) : first, b[0], b[1]);
    multiply(d, BITS == 4 ? first : second, b[2], b[3]);
    return combine_planes(upper ? d[2] : d[0], upper ? d[3] : d[1]);
}

// Two rows in a piece of several groups, two groups at a time.
__device__ inline void add_groups(Sums &sums, const Four &low, const Four &high, const u32 (&b)[B_WORDS], const Work &w,
                                  u32 grid, int number, float step) {
    const int place = threadIdx.x % 4;
#pragma unroll
    for (int set = 0; set < GROUPS / 2; ++set) {
        int d[4] = {0, 0, 0, 0};
        const u32 mine = GROUPS < 4 || place / 2 == set ? ~0u : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            mma_int8(d, low.word[j] & 0x0F0F0F0Fu, high.word[j] & 0x0F0F0F0Fu, low.word[j], high.word[j],
                           b[j % B_WORDS] & mine, b[(4 + j) % B_WORDS] & mine);
        const int group = number * GROUPS + 2 * set + place / 2;
        add(sums, combine_planes(d[0], d[1]), combine_planes(d[2], d[3]), scales_of(w, grid, group), step);
    }
}

// A thread's rows of a tile are this one and the one 8 below.
__device__ inline int row_of(int quad) { return quad / 2 + quad % 2 * 4; }

// Where a thread reads, in bytes: of a line its two cells of a row; of a tile's scales its row's, and its row's offsets
// (thread t has row t % 16, and half t / 16 of the line's groups); of a line's steps and sums its own.
struct ThreadOffsets {
    u32 cells[2], grid, offsets, step, sum;
};

__device__ inline ThreadOffsets thread_offsets(const Work &w, const SharedLayout &to, int lane) {
    const int row = row_of(lane / 4), cell = (lane % 4) ^ row; // row < 8
    ThreadOffsets places;
    places.cells[0] = row * 128 + cell * 16, places.cells[1] = row * 128 + (cell ^ 4) * 16;
    places.grid = row * w.groups * sizeof(ScaleT);
    places.offsets = ((OFFSET ? ROWS : 0) + lane % 16) * w.groups * sizeof(ScaleT);
    places.step = to.steps + lane % 2 * 4, places.sum = to.sums + lane / 16 * 4 * (SLOTS / 2);
    keep_in_register(places.cells[0]), keep_in_register(places.cells[1]), keep_in_register(places.grid), keep_in_register(places.offsets);
    keep_in_register(places.step), keep_in_register(places.sum);
    return places;
}

// What the offsets come to: lanes from 16 on have the second half of a line's groups, where there is one.
__device__ inline float offsets_of(const Work &w, const ThreadOffsets &places, u32 grids, int line, int lane) {
    if (SLOTS == 1 && lane >= 16) return 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (SLOTS + 1) / 2; ++i) {
        const int slot = line * SLOTS + lane / 16 * (SLOTS / 2) + i;
        const int group = TOGETHER ? slot : min(GROUPS == 1 ? slot >> w.shift : slot, w.groups - 1);
        const float offset = scale_to_float(shared_at<ScaleT>(grids + places.offsets + group * sizeof(ScaleT)));
        sum = fmaf(OFFSET ? offset : -8.0f * offset, shared_at<float>(places.sum + 4 * (line * SLOTS + i)), sum);
    }
    return sum;
}

// A line's scales of this thread's two rows.
__device__ inline void read_together(Scales (&to)[SLOTS], u32 grid, u32 below) {
    u32 low[2], high[2];
    if (SLOTS == 4) {
        const uint2 all = shared_at<uint2>(grid), other = shared_at<uint2>(grid + below);
        low[0] = all.x, low[1] = all.y, high[0] = other.x, high[1] = other.y;
    } else {
        low[0] = shared_at<u32>(grid), high[0] = shared_at<u32>(grid + below);
    }
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int by = i % 2 * 16;
        to[i] = {widened(static_cast<u16>(low[i / 2] >> by)), widened(static_cast<u16>(high[i / 2] >> by))};
    }
}

// Two rows' part of a piece of 8-bit weights in two groups or four: a product for each of a row's loads and groups.
__device__ inline void add_loads(Sums &sums, const Four (&low)[2], const Four (&high)[2], const u32 (&b)[B_WORDS],
                                 const Scales (&by)[SLOTS], float step) {
    const int place = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
        const int load = i / (SLOTS / 2 ? SLOTS / 2 : 1);
        const u32 mine = SLOTS < 4 || place / 2 == i % 2 ? ~0u : 0;
        const u32 b0 = b[2 * load] & mine, b1 = b[2 * load + 1] & mine;
        int d[4] = {0, 0, 0, 0}, e[4] = {0, 0, 0, 0};
        multiply(d, low[load], b0, b1);
        multiply(e, high[load], b0, b1);
        const bool upper = place >= 2;
        add(sums, combine_planes(upper ? d[2] : d[0], upper ? d[3] : d[1]), combine_planes(upper ? e[2] : e[0], upper ? e[3] : e[1]), by[i],
            step);
    }
}

__device__ inline void multiply_line(Sums &sums, u32 slot, u32 (&b)[PIECES][B_WORDS], const Work &w, const SharedLayout &to,
                                     const ThreadOffsets &places, u32 grids, int line, int lane) {
    Four low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        low[i] = four(shared_at<uint4>(slot + places.cells[i]));
        high[i] = four(shared_at<uint4>(slot + places.cells[i] + 1024));
    }
    const u32 grid = grids + places.grid;
    Scales known[SLOTS] = {};
    if (TOGETHER) {
        read_together(known, grid + line * SLOTS * sizeof(ScaleT), 8 * w.groups * sizeof(ScaleT));
    } else if (!MIXED) {
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int at = line * SLOTS + i;
            known[i] = scales_of(w, grid, GROUPS == 1 ? at >> w.shift : at);
        }
    }
    if (!SINGLE) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) planes_of(b[i], to, line * PIECES + i, lane);
    }
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int number = line * PIECES + i;
        const float step = shared_at<float>(places.step + 8 * number);
        if (MIXED) {
            add_groups(sums, low[i], high[i], b[i], w, grid, number, step);
        } else if (GROUPS > 1) {
            add_loads(sums, low, high, b[i], known, step);
        } else {
            const bool upper = lane % 4 >= 2;
            const float part = row_part(low[i], low[1], b[i], upper), other = row_part(high[i], high[1], b[i], upper);
            add(sums, part, other, known[i], step);
        }
    }
    if (SUMS) sums.offsets += offsets_of(w, places, grids, line, lane);
}

__device__ inline void finish(const Work &w, u32 kept, int tile) {
    const int mine = threadIdx.x % 32;
    if (mine >= (GATED ? 8 : 16)) return;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < (GATED ? 2 : 1); ++half) {
        const int row = GATED ? first_row(w, tile, half) + mine : tile * 16 + mine;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum[half] += shared_at<float>(kept + 4 * (warp * ROWS + 8 * half + mine));
        if (w.constant) sum[half] += w.constant[row];
        if (w.bias) sum[half] += out_value(w.bias[row]);
    }
    Out result = as_out(sum[0]);
    if (GATED) result = as_out(gated(out_value(result), out_value(as_out(sum[1]))));
    w.out[tile * (GATED ? 8 : 16) + mine] = result;
}

// This warp's sums of a tile, to the others'; whether they were the last.
__device__ inline bool keep(Sums sums, int slot, int warp, int lane) {
    const int row = row_of(lane / 4);
#pragma unroll
    for (int by = 1; by <= 2; by *= 2) // the other planes and words, or groups
        sums.low += __shfl_xor_sync(~0u, sums.low, by), sums.high += __shfl_xor_sync(~0u, sums.high, by);
    if (SUMS) {
        sums.offsets += __shfl_xor_sync(~0u, sums.offsets, 16);
        sums.low += __shfl_sync(~0u, sums.offsets, row), sums.high += __shfl_sync(~0u, sums.offsets, row + 8);
    }
    if (lane % 4 == 0) {
        const u32 kept = KEPT + ((slot * WARPS + warp) * ROWS + row) * 4;
        shared_at<float>(kept) = sums.low, shared_at<float>(kept + 32) = sums.high;
    }
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = shared_atomic_inc(&shared_at<Barriers>(BARRIERS).count[slot], WARPS - 1);
    return __shfl_sync(~0u, before, 0) == WARPS - 1;
}

__device__ inline void multiply_all(const TensorMap &map, const Work &w, const SharedLayout &to, NextLine next) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 b[PIECES][B_WORDS];
    if (SINGLE) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) planes_of(b[i], to, warp * PIECES + i, lane);
    }
    const ThreadOffsets places = thread_offsets(w, to, lane);
    const u32 ring = warp * STAGES * LINE, each = (OFFSET ? 2 : 1) * ROWS * w.groups * sizeof(ScaleT);
    int stage = 0, slot = 0;
    u32 parity = 0, scale_parity = 0;
    for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        mbarrier_wait(scales_full(slot), scale_parity);
        Sums sums = {0.0f, 0.0f, 0.0f};
        for (int line = warp; line < w.lines; line += WARPS) {
            mbarrier_wait(full_of(warp, stage), parity);
            multiply_line(sums, ring + stage * LINE, b, w, to, places, to.grids + slot * each, line, lane);
            __syncwarp();
            if (lane == 0) load_line(map, w, next);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (SINGLE) break;
        }
        if (keep(sums, slot, warp, lane)) {
            fence_acquire(); // what the others kept
            finish(w, KEPT + slot * WARPS * ROWS * 4, tile);
            __syncwarp();
            const int next_here = tile + HELD * gridDim.x;
            if (lane == 0 && next_here < w.tiles) load_scales(w, to, next_here, slot);
        }
        if (++slot == HELD) slot = 0, scale_parity ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) wq_gemv(const __grid_constant__ TensorMap map,
                                                                    const __grid_constant__ Work w) {
    pdl_launch_dependents();
    const SharedLayout to = shared_layout(w);
    const int warp = threadIdx.x / 32;
    NextLine next = {static_cast<int>(blockIdx.x), warp, 0};
    if (threadIdx.x % 32 == 0) {
        prefetch_tensor_map(map);
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full_of(warp, i), 1);
        if (warp == 0) {
            for (int i = 0; i < HELD; ++i) mbarrier_init(scales_full(i), 1), shared_at<Barriers>(BARRIERS).count[i] = 0;
        }
        fence_mbarrier_init();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) load_line(map, w, next);
        if (warp == 0) {
#pragma unroll 1
            for (int i = 0; i < HELD; ++i) {
                const int tile = blockIdx.x + i * gridDim.x;
                if (tile < w.tiles) load_scales(w, to, tile, i);
            }
        }
    }
    __syncthreads();
    pdl_wait();
    stage_x(w, to);
    multiply_all(map, w, to, next);
}
