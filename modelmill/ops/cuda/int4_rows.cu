// Products of 9 to 64 rows with 4-bit weights: as int4_linear.cu, where the rows are too many to be read by every warp.
//
// The copy engine brings 128 columns of x at a time into shared memory. WORKERS warpgroups take 64 rows of the weight
// each, straight from memory into registers, and are the left operand of wgmma there. A thread reads a run of 32 columns
// of two rows, 16 bytes; four threads exchange what they read, so that each has the columns 2 p, 2 p + 1, 2 p + 8 and
// 2 p + 9 of four runs, as wgmma wants them: twelve exchanges for 64 weights, and x needs no order of its own.
//
// A code c is put under the exponent of 128 (1024 in float16) and reads as 128 + c. y = sum over groups of
// scale * part + (offset - 128 * scale) * (sum of x); the sums come from a kernel in front, group_sums.
//
// SPLIT blocks of a cluster share K, and add up in the first one's order at the end.
//
// Macros: BOX (rows of x, padded: 32, 64), WORKERS, SPLIT, DEPTH (pieces of a warp's weights on their way), STAGES (of
// x), GATED (as narrow_weights.cuh), OFFSET (0: symmetric), HALF.
#include "cluster.cuh"

typedef unsigned short u16;

#ifdef HALF
constexpr u32 MAGIC = 0x64006400u;
constexpr float RAISED = 1024.0f;
#else
constexpr u32 MAGIC = 0x43004300u;
constexpr float RAISED = 128.0f;
#endif
constexpr int ROWS = 64 * WORKERS, MULTIPLIERS = 128 * WORKERS, PITCH = ROWS + 4, COLUMNS = 128;
constexpr u32 SLAB = BOX * 128, STAGE = 2 * SLAB, EIGHT = 1024; // a slab: 64 columns of all rows of x
static_assert(STAGES * STAGE >= BOX * PITCH * 4, "the sums find room where x was");
static_assert(BOX % SPLIT == 0, "each block of a cluster writes some rows of the output");

struct Work {
    const uint4 *weight;
    const u16 *scale, *offset; // float16 [N, groups]
    const float *sums;         // of x, [groups, BOX]
    const u16 *bias;           // of x's type, or null
    u16 *out;
    int tokens, rows, runs, groups, shift, share; // share: groups that a block has at most
};

struct Barriers {
    u64 full[STAGES], empty[STAGES];
};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ inline float widened(u16 half_bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half_bits));
    return wide;
}

__device__ inline float value(u16 bits) {
#ifdef HALF
    return widened(bits);
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

__device__ inline u16 rounded(float wide) {
    u16 bits;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(wide));
    return bits;
}

__device__ inline uint4 once(const uint4 *from) {
    uint4 got;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(from));
    return got;
}

// D = A . B' or D += A . B', A in registers, B along_rows in shared memory.
__device__ inline void multiply(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
                 : HOLD_32(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

__device__ inline void multiply(float (&d)[16], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" NAMES_16
                 "}, {%16, %17, %18, %19}, %20, add, 1, 1, 0; }"
                 : HOLD_16(d, 0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

// Of the block's weight rows, 0 … ROWS − 1, the one in memory; those past the end repeat the last.
__device__ inline int row_of(int tile, int mine, int rows) {
    if (GATED) {
        const int own = (tile * (ROWS / 16) + mine / 16) * 8 + mine % 8, half = rows / 2;
        return min(own, half - 1) + (mine % 16 >= 8 ? half : 0);
    }
    return min(tile * ROWS + mine, rows - 1);
}

// Of four threads that hold four words each: word k of thread p becomes word p of thread k.
__device__ inline void exchange(u32 (&v)[4], int place) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = place & bit;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int low = bit == 1 ? 2 * pair : pair, high = low + bit;
            const u32 got = __shfl_xor_sync(~0u, upper ? v[low] : v[high], bit);
            v[low] = upper ? got : v[low];
            v[high] = upper ? v[high] : got;
        }
    }
}

// A run's words, ordered for four threads: thread p's has the bytes of columns 2 p, 2 p + 8, 2 p + 1, 2 p + 9.
__device__ inline void for_threads(u32 (&v)[4], const uint4 &run) {
    v[0] = __byte_perm(run.x, run.z, 0x5140);
    v[1] = __byte_perm(run.x, run.z, 0x7362);
    v[2] = __byte_perm(run.y, run.w, 0x5140);
    v[3] = __byte_perm(run.y, run.w, 0x7362);
}

// (word >> by) & 0x000F000F | MAGIC in one instruction behind the shift: the compiler would take two.
__device__ inline u32 codes(u32 word, int by) {
    u32 both;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(both) : "r"(word >> by), "r"(MAGIC));
    return both;
}

struct Range {
    int begin, end; // pieces of 128 columns of this block
};

__device__ inline Range range_of(int rank, int pieces) {
    const int each = (pieces + SPLIT - 1) / SPLIT;
    return {min(rank * each, pieces), min((rank + 1) * each, pieces)};
}

__device__ inline void load(const TensorMap &x_map, Barriers &barriers, u32 base, Range range) {
    int stage = 0;
    u32 parity = 1; // a fresh barrier counts as having ended a phase of parity 1
    for (int number = range.begin; number < range.end; ++number) {
        wait(shared_address(&barriers.empty[stage]), parity);
        const u32 full = shared_address(&barriers.full[stage]), target = base + stage * STAGE;
        arrive_expecting(full, STAGE);
        load_box(target, x_map, full, number * COLUMNS, 0);
        load_box(target + SLAB, x_map, full, number * COLUMNS + 64, 0);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

struct Piece {
    uint4 low, high;
};

struct Place {
    const uint4 *low, *high;
    int whole; // pieces in which this thread has a run
};

__device__ inline void fetch(Piece &piece, const Place &at, int number) {
    const uint4 zero = {0, 0, 0, 0};
    piece.low = number < at.whole ? once(at.low + 4 * number) : zero;
    piece.high = number < at.whole ? once(at.high + 4 * number) : zero;
}

// part = 64 rows of the weight's piece times x.
__device__ inline void products(float (&part)[BOX / 2], const Piece &piece, u64 x, u32 full, u32 parity, int place) {
    u32 low[4], high[4];
    for_threads(low, piece.low);
    for_threads(high, piece.high);
    exchange(low, place);
    exchange(high, place);
    u32 a[8][4];
#pragma unroll
    for (int run = 0; run < 4; ++run) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32(&to)[4] = a[2 * run + half];
            to[0] = codes(low[run], 4 * half), to[1] = codes(high[run], 4 * half);
            to[2] = codes(low[run], 4 * half + 8), to[3] = codes(high[run], 4 * half + 8);
        }
    }
    wait(full, parity);
    products_begin();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // addresses in a descriptor count 16 bytes
        const u64 right = x + (i / 4 * SLAB + i % 4 * 32) / 16;
        multiply(part, a[i][0], a[i][1], a[i][2], a[i][3], right, i > 0);
    }
    products_end();
#pragma unroll
    for (int i = 0; i < 8; ++i) changed(a[i]); // they are read until the products have ended
    products_wait<0>();
    changed(part);
#pragma unroll
    for (int i = 0; i < 8; ++i) changed(a[i]);
}

__device__ inline void flush(float (&total)[BOX / 2], const float (&part)[BOX / 2], float2 low, float2 high,
                             const float2 *sums) {
    const float base_low = (OFFSET ? low.y : -8.0f * low.x) - RAISED * low.x;
    const float base_high = (OFFSET ? high.y : -8.0f * high.x) - RAISED * high.x;
#pragma unroll
    for (int i = 0; i < BOX / 8; ++i) {
        const float2 sum = sums[4 * i];
        total[4 * i] = fmaf(low.x, part[4 * i], fmaf(base_low, sum.x, total[4 * i]));
        total[4 * i + 1] = fmaf(low.x, part[4 * i + 1], fmaf(base_low, sum.y, total[4 * i + 1]));
        total[4 * i + 2] = fmaf(high.x, part[4 * i + 2], fmaf(base_high, sum.x, total[4 * i + 2]));
        total[4 * i + 3] = fmaf(high.x, part[4 * i + 3], fmaf(base_high, sum.y, total[4 * i + 3]));
    }
}

struct Shares {
    float *sums;    // [share][BOX]
    float2 *grids;  // [ROWS][share + 1]
    float *results; // [BOX][PITCH], where x was
};

// Scales and offsets of the block's rows and groups; the sums of x when it is there.
__device__ inline void stage_grids(const Work &w, const Shares &to, int tile, int first, int count) {
    for (int i = threadIdx.x; i < ROWS * count; i += MULTIPLIERS) {
        const int mine = i / count, g = i - mine * count;
        const long long at = static_cast<long long>(row_of(tile, mine, w.rows)) * w.groups + first + g;
        to.grids[mine * (w.share + 1) + g] = {widened(w.scale[at]), OFFSET ? widened(w.offset[at]) : 0.0f};
    }
}

__device__ inline void work_on(const Work &w, Barriers &barriers, u32 base, const Shares &to, int tile, Range range) {
    const int lane = threadIdx.x % 32, place = lane % 4, mine = threadIdx.x / 32 * 16 + lane / 4;
    const Place at = {w.weight + static_cast<long long>(row_of(tile, mine, w.rows)) * w.runs + place,
                      w.weight + static_cast<long long>(row_of(tile, mine + 8, w.rows)) * w.runs + place,
                      (w.runs - place + 3) / 4};
    Piece ahead[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        if (range.begin + s < range.end) fetch(ahead[s], at, range.begin + s);
    }
    const int first = range.begin >> w.shift, count = ((range.end - 1) >> w.shift) - first + 1;
    stage_grids(w, to, tile, first, count);
    after_those_in_front();
    let_next_in();
    for (int i = threadIdx.x; i < count * BOX; i += MULTIPLIERS) to.sums[i] = w.sums[first * BOX + i];
    meet(1, MULTIPLIERS);
    float total[BOX / 2] = {}, part[BOX / 2];
    const float2 *grid_low = to.grids + mine * (w.share + 1), *grid_high = grid_low + 8 * (w.share + 1);
    const float2 *sums = reinterpret_cast<const float2 *>(to.sums) + place;
    const u32 full = shared_address(&barriers.full[0]); // the others follow
    const u64 x = along_rows(base, EIGHT);
    int stage = 0;
    u32 parity = 0;
    for (int start = range.begin; start < range.end; start += DEPTH) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int number = start + s;
            if (number < range.end) {
                const Piece piece = ahead[s];
                if (number + DEPTH < range.end) fetch(ahead[s], at, number + DEPTH);
                products(part, piece, x + stage * (STAGE / 16), full + 8 * stage, parity, place);
                if (lane == 0) arrive(full + 8 * (STAGES + stage));
                if (++stage == STAGES) stage = 0, parity ^= 1;
                const int group = (number >> w.shift) - first;
                flush(total, part, grid_low[group], grid_high[group], sums + group * (BOX / 2));
            }
        }
    }
    meet(1, MULTIPLIERS); // nobody reads x any more
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) {
        const int token = i / 4 * 8 + place * 2 + i % 2;
        to.results[token * PITCH + mine + (i % 4 >= 2 ? 8 : 0)] = total[i];
    }
}

__device__ inline float of_rank(const float *mine, int rank) {
    float got;
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %1, %2;\n"
                 "ld.shared::cluster.f32 %0, [there]; }"
                 : "=f"(got)
                 : "r"(shared_address(mine)), "r"(rank)
                 : "memory");
    return got;
}

__device__ inline float summed(const float *at, const u16 *bias, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) sum += SPLIT > 1 ? of_rank(at, rank) : *at;
    return bias ? sum + value(bias[row]) : sum;
}

// This block's rows of the output, all of the tile's columns.
__device__ inline void finish(const Work &w, const float *results, int tile, int rank) {
    constexpr int WIDE = GATED ? ROWS / 2 : ROWS, EACH = BOX / SPLIT;
    const int columns = GATED ? w.rows / 2 : w.rows;
    for (int i = threadIdx.x; i < EACH * WIDE; i += MULTIPLIERS) {
        const int token = rank * EACH + i / WIDE, own = i % WIDE, column = tile * WIDE + own;
        if (token >= w.tokens || column >= columns) continue;
        const float *at = results + token * PITCH + (GATED ? own / 8 * 16 + own % 8 : own);
        u16 result = rounded(summed(at, w.bias, column));
        if (GATED) {
            const float gate = value(result), up = value(rounded(summed(at + 8, w.bias, column + columns)));
            result = rounded(gate / (1.0f + __expf(-gate)) * up);
        }
        w.out[static_cast<long long>(token) * columns + column] = result;
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(MULTIPLIERS + 32, 1)
    int4_rows(const __grid_constant__ TensorMap x_map, const __grid_constant__ Work w) {
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    const u32 base = shared_address(shared);
    Shares to;
    to.results = reinterpret_cast<float *>(shared);
    to.sums = reinterpret_cast<float *>(shared + STAGES * STAGE);
    to.grids = reinterpret_cast<float2 *>(to.sums + w.share * BOX);
    Barriers &barriers = *reinterpret_cast<Barriers *>(to.grids + ROWS * (w.share + 1));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&barriers.full[i]), 1);
            barrier_init(shared_address(&barriers.empty[i]), WORKERS * 4);
        }
        barriers_ready();
    }
    __syncthreads();
    const Range range = range_of(rank, (w.runs + 3) / 4);
    const bool multiplier = __shfl_sync(~0u, threadIdx.x / 128, 0) < WORKERS;
    if (multiplier) {
        work_on(w, barriers, base, to, tile, range);
    } else {
        after_those_in_front();
        if (threadIdx.x % 32 == 0) load(x_map, barriers, base, range);
        __syncwarp();
    }
    if (SPLIT > 1)
        cluster_meet();
    else if (multiplier)
        meet(1, MULTIPLIERS);
    if (multiplier) finish(w, to.results, tile, rank);
    if (SPLIT > 1) cluster_meet(); // a block that ended could not be read
}

struct Summing {
    const u16 *x;
    float *sums; // [groups, BOX]
    int tokens, columns, stride, groups, group;
};

// The sum of each row of x in each group; a warp for each.
extern "C" __global__ void __launch_bounds__(256) group_sums(const __grid_constant__ Summing w) {
    after_those_in_front();
    let_next_in();
    const int at = blockIdx.x * 8 + threadIdx.x / 32, g = at / BOX, token = at % BOX;
    if (g >= w.groups) return;
    float sum = 0.0f;
    if (token < w.tokens) {
        const int end = min((g + 1) * w.group, w.columns);
        const u16 *row = w.x + static_cast<long long>(token) * w.stride;
        for (int column = g * w.group + threadIdx.x % 32 * 4; column < end; column += 128) {
            const uint2 four = *reinterpret_cast<const uint2 *>(row + column);
            sum += (value(four.x & 0xFFFF) + value(four.x >> 16)) + (value(four.y & 0xFFFF) + value(four.y >> 16));
        }
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (threadIdx.x % 32 == 0) w.sums[at] = sum;
}
