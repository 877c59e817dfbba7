// Weight-only int4/int8 GEMV (decode) on the int8 tensor cores, bound by weight bandwidth.
//
// Computes: out[1, N] = x[1, K] · dequant(weight[N, K])ᵀ (+ bias[N]); with GATED SwiGLU of the two
//     halves of N; with INT8_INPUT the sums of rptq_linear
// Dtypes: x bfloat16, float16 or int8 (INT8_INPUT); weights int8 or packed int4; float16 or float32
//     scales and offsets; exact integer sums of a K tile
// Layout: row-major, 16-byte aligned; scales and offsets [N, groups]; weight lines in shared memory
//     (128-byte swizzle)
// Range: M = 1; N a multiple of 16, K of 32, weight rows of a multiple of 16 bytes
// Technique: TMA, mbarrier pipelines per warp, int8 mma.sync on base-256 digit planes, persistent
//     blocks, PDL
// Ops: int4_linear, int4_linear_swiglu, int8_linear, int8_linear_swiglu, int8_group_linear,
//     rptq_linear (launched by wq_gemv.py)
//
// x is converted to integers: the 128 columns of a K tile share a power-of-two scale and each value
// is up to four signed base-256 digits ("digit planes"), 27 or 31 bits below the tile's largest
// value. The mma's B operand has eight columns, of which one row of x would fill one; the planes
// fill four at no cost, and no weight is converted to float. For 4-bit codes the mma uses a word as
// loaded and once more with its high nibbles masked: low · x_low + high · x_high = low · (x_low −
// x_high / 16) + byte · (x_high / 16). INT8_INPUT needs one plane, or two with 4-bit weights. Sums
// of a K tile are integers below 2^22.
//
// The A operand is four words of one weight row as loaded by a thread; the mma treats the second
// and fourth as another row, + 8. So four columns of B are multiplied with the first and third word
// and four with the second and fourth, and half of the results are used for each. If a K tile of
// 4-bit weights has several groups (GROUPS 2 or 4: 64 or 32 columns) the other four columns belong
// to another group, and two weight rows are combined in one operand. For 8-bit weights the two
// loads of a row have separate groups and separate mmas; groups of 32 columns take two more, with
// the other threads' columns set to 0.
//
// Persistent: a block processes tiles of 16 weight rows. Each warp owns a part of every row, 128
// bytes wide (lines), and its own TMA pipeline in shared memory, refilled as soon as a line is
// consumed and filled before x is available (PDL); warps do not wait for each other. The last warp
// to finish a tile reduces it (atomic counter in shared memory). With the 128-byte swizzle (16-byte
// cell c of row r at c ^ (r % 8)) the rows of a thread are chosen so that shared-memory reads have
// no bank conflicts.
//
// Macros: BITS (of a weight), GROUPS (per K tile: 1, 2, 4), INT8_INPUT, GATED (eight rows of a tile
// are gate rows, the others the matching up rows), OFFSET, SCALE_FP32 (scales are float32), WARPS,
// STAGES (per warp), SCALE_STAGES (tiles whose scales and sums are in shared memory), SINGLE_LINE
// (a warp has at most one line per row: x stays in registers), VECTOR_SCALES (a line's two or four
// 16-bit scales are read by one load), OUT_FP32 or HALF (the output type).
#include "weight_only_gemm/digit_planes.cuh"
#include "weight_only_gemm/tile_scales.cuh"

constexpr int ROWS = 16;
constexpr int K_TILES = 8 / BITS;                      // K tiles per line
constexpr bool PAIRED_ROWS = BITS == 4 && GROUPS > 1;  // two weight rows in one A operand
constexpr int B_WORDS = PAIRED_ROWS ? 8 : 4;           // words of x per thread and K tile
constexpr u32 LINE_TILE_BYTES = ROWS * 128;
constexpr int PLANES = INT8_INPUT ? K_TILES : 4;
constexpr int DIGIT_BITS = BITS == 4 ? 26 : 30;  // bits of the largest value of a K tile
// lines of x that a warp loads before using the first
constexpr int LINES_PER_LOAD = SINGLE_LINE ? 1 : 3;
static_assert(GROUPS == 1 || !INT8_INPUT, "INT8_INPUT needs one group per K tile");
constexpr int SLOTS = K_TILES * GROUPS;  // groups per line
static_assert(!VECTOR_SCALES || (!PAIRED_ROWS && !SCALE_FP32 && SLOTS > 1),
              "VECTOR_SCALES needs one or two words of 16-bit scales per line");
// symmetric int4 codes have zero-point 8; int8 has none
constexpr bool USES_SUMS = BITS == 4 || OFFSET;

struct Work {
    const void* x;                 // [K], 16 bits, or int8
    const ScaleT *scale, *offset;  // [N, groups]
    const float* step;             // [groups], INT8_INPUT only
    const float* constant;         // [N] or null
    const Out* bias;               // [N] or null
    Out* out;
    int rows, columns, groups;
    int shift;  // log2 of the K tiles that share a scale
    int tiles, lines;
};

extern __shared__ __align__(1024) unsigned char shared[];

static_assert(sizeof(Work) == 80, "wq_gemv.py packs 80 bytes");

struct Barriers {
    u64 full[WARPS][STAGES], scales[SCALE_STAGES];
    u32 count[SCALE_STAGES];
};

// Shared-memory layout in bytes: the warps' pipelines, the parts of constant size, then the rest.
constexpr u32 BARRIERS_AT = WARPS * STAGES * LINE_TILE_BYTES,
              SUMS_AT = BARRIERS_AT + (sizeof(Barriers) + 15) / 16 * 16;
// end of the sums [SCALE_STAGES][WARPS][ROWS]
constexpr u32 DYNAMIC_AT = SUMS_AT + SCALE_STAGES * WARPS * ROWS * 4;

struct SharedLayout {
    u32 x;      // [k_tiles][2][PLANES][4] cells of 16 columns (store_planes)
    u32 steps;  // [k_tiles][2] float32: of the lower two planes, of the upper two
    u32 sums;   // [k_tiles][GROUPS] float32
    u32 grids;  // [SCALE_STAGES][scales of ROWS rows, offsets]
};

template <typename T> __device__ inline T& shared_at(u32 place) {
    return *reinterpret_cast<T*>(shared + place);
}

__device__ inline u32 full_of(int warp, int stage) {
    return shared_address(shared) + BARRIERS_AT + (warp * STAGES + stage) * 8;
}

__device__ inline u32 scales_full(int slot) {
    return shared_address(shared) + BARRIERS_AT + (WARPS * STAGES + slot) * 8;
}

__device__ inline SharedLayout shared_layout(const Work& w) {
    const u32 k_tiles = w.lines * K_TILES;
    const u32 steps = DYNAMIC_AT + k_tiles * PLANES * 128, sums = steps + 8 * k_tiles;
    return {DYNAMIC_AT, steps, sums,
            (sums + (USES_SUMS ? 4 * k_tiles * GROUPS : 0) + 15) / 16 * 16};
}

// Called by one thread.
__device__ inline void load_scales(const Work& w, const SharedLayout& to, int tile, int slot) {
    const u32 place = to.grids + slot * tile_scale_bytes(w);
    load_tile_scales(w, shared_address(shared) + place, scales_full(slot), tile);
}

// The next line that a warp loads, issued by one thread. TMA fills columns past the end with zeros.
struct NextLine {
    int tile, line, stage;
};

__device__ inline void load_line(const TensorMap& map, const Work& w, NextLine& next) {
    if (next.tile < w.tiles) {
        const u32 warp = threadIdx.x / 32, full = full_of(warp, next.stage);
        const u32 target = shared_address(shared) + (warp * STAGES + next.stage) * LINE_TILE_BYTES;
        mbarrier_arrive_expect_tx(full, LINE_TILE_BYTES);
        if (GATED) {
            tma_load(target, map, full, next.line * 32, next.tile * 8, 0);  // gate and up rows
        } else {
            tma_load(target, map, full, next.line * 32, next.tile * 16);
        }
    }
    if (++next.stage == STAGES) next.stage = 0;
    next.line += WARPS;
    if (next.line >= w.lines) next.line = threadIdx.x / 32, next.tile += gridDim.x;
}

// 4 x 4 byte transpose: to[i] has byte i of each word.
__device__ inline void transpose(const u32 (&from)[4], u32 (&to)[4]) {
    const u32 a = __byte_perm(from[0], from[1], 0x5140), b = __byte_perm(from[2], from[3], 0x5140);
    const u32 c = __byte_perm(from[0], from[1], 0x7362), d = __byte_perm(from[2], from[3], 0x7362);
    to[0] = __byte_perm(a, b, 0x5410), to[1] = __byte_perm(a, b, 0x7632);
    to[2] = __byte_perm(c, d, 0x5410), to[3] = __byte_perm(c, d, 0x7632);
}

// Stores four integers (columns 4 · lane …) to the digit planes of a K tile.
__device__ inline void store_planes(const SharedLayout& to, int k_tile, int (&ints)[4], int lane) {
    if (BITS == 4) {  // low nibbles are columns 0 … 15 of a run, high nibbles 16 … 31
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int upper = __shfl_down_sync(~0u, ints[i], 4);
            if (lane % 8 < 4) ints[i] = 16 * ints[i] - upper;
        }
    }
    u32 digits[4], planes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) digits[i] = (static_cast<u32>(ints[i]) + 0x00808080u) ^ 0x00808080u;
    transpose(digits, planes);
    // quad lane p multiplies words 0 … 3 of its two loads, or of their low and high nibbles
    const int half = BITS == 4 ? lane / 4 % 2 : lane / 16,
              place = BITS == 4 ? lane / 8 : lane / 4 % 4, word = lane % 4;
    const int cell = PAIRED_ROWS ? half : word % 2, at = PAIRED_ROWS ? word : half * 2 + word / 2;
    const u32 first = to.x + k_tile * PLANES * 128 + (cell * PLANES * 4 + place) * 16 + at * 4;
#pragma unroll
    for (int n = 0; n < PLANES; ++n) shared_at<u32>(first + n * 64) = planes[n];
}

// Reduces and stores the sum of each 128 / GROUPS columns; a thread has four columns.
__device__ inline void store_sum(const SharedLayout& to, int k_tile, float sum, int lane) {
#pragma unroll
    for (int by = 16 / GROUPS; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane % (32 / GROUPS) == 0)
        shared_at<float>(to.sums + 4 * (k_tile * GROUPS + lane / (32 / GROUPS))) = sum;
}

// Converts 16-bit columns of x to digit planes.
__device__ inline void stage_floats(const SharedLayout& to, int k_tile, uint2 four, int lane) {
    const u32 a = four.x & 0x7FFF7FFFu, b = four.y & 0x7FFF7FFFu;
    const u32 most =
        __reduce_max_sync(~0u, max(max(a & 0xFFFF, a >> 16), max(b & 0xFFFF, b >> 16)));
    const u32 largest = __float_as_uint(to_float(static_cast<u16>(most))) >> 23;
    const u32 exponent = max(largest, 31u);  // clamps the exponent; smaller values become 0
    const float up = __uint_as_float((253 + DIGIT_BITS - exponent) << 23);
    const float values[4] = {to_float(four.x & 0xFFFF), to_float(four.x >> 16),
                             to_float(four.y & 0xFFFF), to_float(four.y >> 16)};
    int ints[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ints[i] = __float2int_rn(values[i] * up);
    store_planes(to, k_tile, ints, lane);
    if (lane == 0) {
        const u32 bits = (exponent + 1 - DIGIT_BITS - (BITS == 4 ? 4 : 0)) << 23;
        // propagates NaN and infinity
        const float step = __uint_as_float(largest == 255 ? 0x7FC00000u : bits);
        shared_at<float2>(to.steps + 8 * k_tile) = {step, 65536.0f * step};
    }
    if (USES_SUMS) store_sum(to, k_tile, (values[0] + values[1]) + (values[2] + values[3]), lane);
}

// Stores int8 columns of x.
__device__ inline void stage_integers(const Work& w, const SharedLayout& to, int k_tile, u32 four,
                                      int lane) {
    const float step = w.step[min(k_tile >> w.shift, w.groups - 1)];
    int ints[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ints[i] = static_cast<int>(four << (24 - 8 * i)) >> 24;
    store_planes(to, k_tile, ints, lane);
    if (lane == 0)
        shared_at<float2>(to.steps + 8 * k_tile) = {BITS == 4 ? 0.0625f * step : step, 0.0f};
    if (USES_SUMS)
        store_sum(to, k_tile,
                  step * static_cast<float>(__dp4a(static_cast<int>(four), 0x01010101, 0)), lane);
}

// Stages the columns of x that this warp uses.
__device__ inline void stage_x(const Work& w, const SharedLayout& to) {
    const int lane = threadIdx.x % 32;
    for (int line = threadIdx.x / 32; line < w.lines; line += LINES_PER_LOAD * WARPS) {
        uint2 loaded[LINES_PER_LOAD][K_TILES];
#pragma unroll
        for (int i = 0; i < LINES_PER_LOAD * K_TILES; ++i) {  // no columns past the last line
            const int column =
                ((line + i / K_TILES * WARPS) * K_TILES + i % K_TILES) * 128 + 4 * lane;
            uint2& four = loaded[i / K_TILES][i % K_TILES];
            four = {0, 0};
            if (column < w.columns) {
                if (INT8_INPUT) {
                    four.x = static_cast<const u32*>(w.x)[column / 4];
                } else {
                    four = static_cast<const uint2*>(w.x)[column / 4];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < LINES_PER_LOAD * K_TILES; ++i) {
            const int mine = line + i / K_TILES * WARPS, k_tile = mine * K_TILES + i % K_TILES;
            if (mine >= w.lines) break;
            if (INT8_INPUT) {
                stage_integers(w, to, k_tile, loaded[i / K_TILES][i % K_TILES].x, lane);
            } else {
                stage_floats(to, k_tile, loaded[i / K_TILES][i % K_TILES], lane);
            }
        }
    }
    __syncwarp();
}

// Loads a thread's B fragment of a K tile: the planes of column lane / 4.
__device__ inline void planes_of(u32 (&b)[B_WORDS], const SharedLayout& to, int k_tile, int lane) {
    const int quad = lane / 4, place = lane % 4, plane = quad % 4;
    const u32 piece = to.x + k_tile * PLANES * 128;
    uint4 loaded = {0, 0, 0, 0};
    if (!PAIRED_ROWS) {
        if (plane < PLANES)
            loaded = shared_at<uint4>(piece + ((quad / 4 * PLANES + plane) * 4 + place) * 16);
        b[0] = loaded.x, b[1] = loaded.y, b[2] = loaded.z, b[3] = loaded.w;
        return;
    }
    const bool mine = GROUPS == 2 ? place / 2 == quad / 4 : place % 2 == quad / 4;
#pragma unroll
    for (int half = 0; half < B_WORDS / 4; ++half) {
        if (mine) loaded = shared_at<uint4>(piece + ((half * PLANES + plane) * 4 + place) * 16);
        b[4 * half] = loaded.x, b[4 * half + 1] = loaded.y, b[4 * half + 2] = loaded.z,
              b[4 * half + 3] = loaded.w;
    }
}

// Combines the sums of two planes, below 2^31.
__device__ inline float combine_planes(int lower, int upper) {
    return static_cast<float>(256 * upper + lower);
}

struct Sums {
    float low, high;  // of this thread's two rows, partial over columns and planes
    float offsets;    // offset term of row lane % 16
};

struct Scales {
    float low, high;
};

__device__ inline Scales scales_of(const Work& w, u32 grid, int group) {
    const u32 at = grid + min(group, w.groups - 1) * sizeof(ScaleT);
    return {scale_to_float(shared_at<ScaleT>(at)),
            scale_to_float(shared_at<ScaleT>(at + 8 * w.groups * sizeof(ScaleT)))};
}

__device__ inline void add(Sums& sums, float low, float high, Scales by, float step) {
    sums.low = fmaf(by.low * step, low, sums.low);
    sums.high = fmaf(by.high * step, high, sums.high);
}

struct Words {
    u32 word[4];
};

__device__ inline Words words_of(uint4 from) { return {{from.x, from.y, from.z, from.w}}; }

__device__ inline Words low_nibbles(Words from) {
    return {{from.word[0] & 0x0F0F0F0Fu, from.word[1] & 0x0F0F0F0Fu, from.word[2] & 0x0F0F0F0Fu,
             from.word[3] & 0x0F0F0F0Fu}};
}

__device__ inline void multiply(int (&d)[4], const Words& a, u32 b0, u32 b1) {
    mma_int8(d, a.word[0], a.word[1], a.word[2], a.word[3], b0, b1);
}

// One row of a K tile with one group: two loads of 8-bit weights, or one of 4-bit weights, masked
// and as is.
__device__ inline float row_part(const Words& first, const Words& second, const u32 (&b)[B_WORDS],
                                 bool upper) {
    int d[4] = {0, 0, 0, 0};
    multiply(d, BITS == 4 ? low_nibbles(first) : first, b[0], b[1]);
    multiply(d, BITS == 4 ? first : second, b[2], b[3]);
    return combine_planes(upper ? d[2] : d[0], upper ? d[3] : d[1]);
}

// Two rows of a K tile with several groups (4-bit), two groups at a time.
__device__ inline void add_groups(Sums& sums, const Words& low, const Words& high,
                                  const u32 (&b)[B_WORDS], const Work& w, u32 grid, int k_tile,
                                  float step) {
    const int place = threadIdx.x % 4;
#pragma unroll
    for (int set = 0; set < GROUPS / 2; ++set) {
        int d[4] = {0, 0, 0, 0};
        const u32 mine = GROUPS < 4 || place / 2 == set ? ~0u : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            mma_int8(d, low.word[j] & 0x0F0F0F0Fu, high.word[j] & 0x0F0F0F0Fu, low.word[j],
                     high.word[j], b[j % B_WORDS] & mine, b[(4 + j) % B_WORDS] & mine);
        const int group = k_tile * GROUPS + 2 * set + place / 2;
        add(sums, combine_planes(d[0], d[1]), combine_planes(d[2], d[3]), scales_of(w, grid, group),
            step);
    }
}

// A thread's rows of a tile are this one and that + 8.
__device__ inline int row_of(int quad) { return quad / 2 + quad % 2 * 4; }

// A thread's byte offsets: its two cells of a line's row; its row's scales and offsets in a tile
// (for the offsets thread t has row t % 16 and half t / 16 of the line's groups); its steps and
// sums.
struct ThreadOffsets {
    u32 cells[2], grid, offsets, step, sum;
};

__device__ inline ThreadOffsets thread_offsets(const Work& w, const SharedLayout& to, int lane) {
    const int row = row_of(lane / 4), cell = (lane % 4) ^ row;  // row < 8
    ThreadOffsets addresses;
    addresses.cells[0] = row * 128 + cell * 16, addresses.cells[1] = row * 128 + (cell ^ 4) * 16;
    addresses.grid = row * w.groups * sizeof(ScaleT);
    addresses.offsets = ((OFFSET ? ROWS : 0) + lane % 16) * w.groups * sizeof(ScaleT);
    addresses.step = to.steps + lane % 2 * 4, addresses.sum = to.sums + lane / 16 * 4 * (SLOTS / 2);
    keep_in_register(addresses.cells[0]), keep_in_register(addresses.cells[1]),
        keep_in_register(addresses.grid), keep_in_register(addresses.offsets);
    keep_in_register(addresses.step), keep_in_register(addresses.sum);
    return addresses;
}

// Offset term of a line; lanes 16 … 31 have the second half of its groups, if any.
__device__ inline float offsets_of(const Work& w, const ThreadOffsets& addresses, u32 grids,
                                   int line, int lane) {
    if (SLOTS == 1 && lane >= 16) return 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (SLOTS + 1) / 2; ++i) {
        const int slot = line * SLOTS + lane / 16 * (SLOTS / 2) + i;
        const int group =
            VECTOR_SCALES ? slot : min(GROUPS == 1 ? slot >> w.shift : slot, w.groups - 1);
        const float offset =
            scale_to_float(shared_at<ScaleT>(grids + addresses.offsets + group * sizeof(ScaleT)));
        sum = fmaf(OFFSET ? offset : -8.0f * offset,
                   shared_at<float>(addresses.sum + 4 * (line * SLOTS + i)), sum);
    }
    return sum;
}

// Loads a line's scales of this thread's two rows.
__device__ inline void load_line_scales(Scales (&to)[SLOTS], u32 grid, u32 below) {
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
        to[i] = {half_to_float(static_cast<u16>(low[i / 2] >> by)),
                 half_to_float(static_cast<u16>(high[i / 2] >> by))};
    }
}

// Two rows of a K tile of 8-bit weights in two or four groups: one mma per load and group.
__device__ inline void add_loads(Sums& sums, const Words (&low)[2], const Words (&high)[2],
                                 const u32 (&b)[B_WORDS], const Scales (&by)[SLOTS], float step) {
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
        add(sums, combine_planes(upper ? d[2] : d[0], upper ? d[3] : d[1]),
            combine_planes(upper ? e[2] : e[0], upper ? e[3] : e[1]), by[i], step);
    }
}

__device__ inline void multiply_line(Sums& sums, u32 slot, u32 (&b)[K_TILES][B_WORDS],
                                     const Work& w, const SharedLayout& to,
                                     const ThreadOffsets& addresses, u32 grids, int line,
                                     int lane) {
    Words low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        low[i] = words_of(shared_at<uint4>(slot + addresses.cells[i]));
        high[i] = words_of(shared_at<uint4>(slot + addresses.cells[i] + 1024));
    }
    const u32 grid = grids + addresses.grid;
    Scales scales[SLOTS] = {};
    if (VECTOR_SCALES) {
        load_line_scales(scales, grid + line * SLOTS * sizeof(ScaleT),
                         8 * w.groups * sizeof(ScaleT));
    } else if (!PAIRED_ROWS) {
#pragma unroll
        for (int i = 0; i < SLOTS; ++i) {
            const int at = line * SLOTS + i;
            scales[i] = scales_of(w, grid, GROUPS == 1 ? at >> w.shift : at);
        }
    }
    if (!SINGLE_LINE) {
#pragma unroll
        for (int i = 0; i < K_TILES; ++i) planes_of(b[i], to, line * K_TILES + i, lane);
    }
#pragma unroll
    for (int i = 0; i < K_TILES; ++i) {
        const int k_tile = line * K_TILES + i;
        const float step = shared_at<float>(addresses.step + 8 * k_tile);
        if (PAIRED_ROWS) {
            add_groups(sums, low[i], high[i], b[i], w, grid, k_tile, step);
        } else if (GROUPS > 1) {
            add_loads(sums, low, high, b[i], scales, step);
        } else {
            const bool upper = lane % 4 >= 2;
            const float part = row_part(low[i], low[1], b[i], upper),
                        other = row_part(high[i], high[1], b[i], upper);
            add(sums, part, other, scales[i], step);
        }
    }
    if (USES_SUMS) sums.offsets += offsets_of(w, addresses, grids, line, lane);
}

__device__ inline void finish(const Work& w, u32 sums_at, int tile) {
    const int mine = threadIdx.x % 32;
    if (mine >= (GATED ? 8 : 16)) return;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < (GATED ? 2 : 1); ++half) {
        const int row = GATED ? first_row(w, tile, half) + mine : tile * 16 + mine;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp)
            sum[half] += shared_at<float>(sums_at + 4 * (warp * ROWS + 8 * half + mine));
        if (w.constant) sum[half] += w.constant[row];
        if (w.bias) sum[half] += out_value(w.bias[row]);
    }
    Out result = as_out(sum[0]);
    if (GATED) result = as_out(silu_mul(out_value(result), out_value(as_out(sum[1]))));
    w.out[tile * (GATED ? 8 : 16) + mine] = result;
}

// Publishes this warp's sums of a tile. Returns whether it is the last warp.
__device__ inline bool publish_sums(Sums sums, int slot, int warp, int lane) {
    const int row = row_of(lane / 4);
#pragma unroll
    for (int by = 1; by <= 2; by *= 2)  // over planes and words, or groups
        sums.low += __shfl_xor_sync(~0u, sums.low, by),
            sums.high += __shfl_xor_sync(~0u, sums.high, by);
    if (USES_SUMS) {
        sums.offsets += __shfl_xor_sync(~0u, sums.offsets, 16);
        sums.low += __shfl_sync(~0u, sums.offsets, row),
            sums.high += __shfl_sync(~0u, sums.offsets, row + 8);
    }
    if (lane % 4 == 0) {
        const u32 sums_at = SUMS_AT + ((slot * WARPS + warp) * ROWS + row) * 4;
        shared_at<float>(sums_at) = sums.low, shared_at<float>(sums_at + 32) = sums.high;
    }
    __syncwarp();
    u32 before = 0;
    if (lane == 0)
        before = shared_atomic_inc(&shared_at<Barriers>(BARRIERS_AT).count[slot], WARPS - 1);
    return __shfl_sync(~0u, before, 0) == WARPS - 1;
}

__device__ inline void multiply_all(const TensorMap& map, const Work& w, const SharedLayout& to,
                                    NextLine next) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 b[K_TILES][B_WORDS];
    if (SINGLE_LINE) {
#pragma unroll
        for (int i = 0; i < K_TILES; ++i) planes_of(b[i], to, warp * K_TILES + i, lane);
    }
    const ThreadOffsets addresses = thread_offsets(w, to, lane);
    const u32 ring = warp * STAGES * LINE_TILE_BYTES, each = tile_scale_bytes(w);
    int stage = 0, slot = 0;
    u32 parity = 0, scale_parity = 0;
    for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        mbarrier_wait(scales_full(slot), scale_parity);
        Sums sums = {0.0f, 0.0f, 0.0f};
        for (int line = warp; line < w.lines; line += WARPS) {
            mbarrier_wait(full_of(warp, stage), parity);
            multiply_line(sums, ring + stage * LINE_TILE_BYTES, b, w, to, addresses,
                          to.grids + slot * each, line, lane);
            __syncwarp();
            if (lane == 0) load_line(map, w, next);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (SINGLE_LINE) break;
        }
        if (publish_sums(sums, slot, warp, lane)) {
            fence_acquire();  // the sums of the other warps
            finish(w, SUMS_AT + slot * WARPS * ROWS * 4, tile);
            __syncwarp();
            const int next_here = tile + SCALE_STAGES * gridDim.x;
            if (lane == 0 && next_here < w.tiles) load_scales(w, to, next_here, slot);
        }
        if (++slot == SCALE_STAGES) slot = 0, scale_parity ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    wq_gemv(const __grid_constant__ TensorMap map, const __grid_constant__ Work w) {
    pdl_launch_dependents();
    const SharedLayout to = shared_layout(w);
    const int warp = threadIdx.x / 32;
    NextLine next = {static_cast<int>(blockIdx.x), warp, 0};
    if (threadIdx.x % 32 == 0) {
        prefetch_tensor_map(map);
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full_of(warp, i), 1);
        if (warp == 0) {
            for (int i = 0; i < SCALE_STAGES; ++i)
                mbarrier_init(scales_full(i), 1), shared_at<Barriers>(BARRIERS_AT).count[i] = 0;
        }
        fence_mbarrier_init();
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) load_line(map, w, next);
        if (warp == 0) {
#pragma unroll 1
            for (int i = 0; i < SCALE_STAGES; ++i) {
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
