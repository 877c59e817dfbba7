// Products of one row of x with 4- or 8-bit weights, as fast as the weights come from memory.
//
// A block stays on its multiprocessor and takes 16 rows of the weight (a tile) after another. One warp has the copy
// engine bring them into a ring of shared memory, 1,024 bytes of each row at a time: that needs no registers and does not
// wait for the kernel in front, so that the ring is full when x is there, and memory is never idle between kernels. The
// other warps multiply, each its pieces of 128 columns, with the weight as the left operand of the tensor cores; x is the
// first column of the right one. Which column a slot along K stands for is free, as long as x comes in the same order.
//
// Weights of x's kind (INTEGER 0): y = scale · part + offset · (sum of x). A 4-bit code c is put under the exponent of
// 128 (1024 in float16) and reads as 128 + c, which the sums of x take out again. A byte's lower seven bits under that
// exponent, less its sign there, are the byte. Integers (INTEGER 1): y = step · (scale · part + offset · (sum of q)), parts
// and sums in int32 and below 2^24, which float32 holds exactly.
//
// Where a piece has several groups (GROUPS 2 or 4: 64 or 32 columns, 4 bits), each has a column of the right operand of
// its own: there are eight, and the threads of a quad hold different groups' columns.
//
// Macros: BITS (of a weight), GROUPS (of a piece: 1, 2, 4), INTEGER, GATED (eight rows of a tile are of the gate, the others the same of the half
// below), OFFSET, WIDE (scales and offsets are float32), STAGES (of the ring), FLOAT or HALF (the output's type).
#include "cluster.cuh"

typedef unsigned short u16;

constexpr int WARPS = 16, MULTIPLIERS = 32 * WARPS, ROWS = 16, TILES_OF_SCALES = 3, TILES_OF_SUMS = 4;
// Bytes of a piece; of a row at a time, a piece for each warp; of a row of a box, of which a chunk is one or two wide.
constexpr int PIECE = BITS * 16, CHUNK = WARPS * PIECE, PITCH = 1024, BOXES = CHUNK / PITCH;
constexpr u32 STAGE = ROWS * CHUNK, BOX = ROWS * PITCH;
static_assert(GROUPS == 1 || (BITS == 4 && !INTEGER), "threads hold different groups' columns");
constexpr bool SUMS = INTEGER ? OFFSET : (OFFSET || BITS == 4);
#ifdef HALF
constexpr u32 MAGIC = 0x64006400u;
constexpr float RAISED = 1024.0f;
#else
constexpr u32 MAGIC = 0x43004300u;
constexpr float RAISED = 128.0f;
#endif

#if WIDE
typedef float Grid;
#else
typedef u16 Grid;
#endif
#ifdef FLOAT
typedef float Out;
#else
typedef u16 Out;
#endif

struct Work {
    const void *x;               // [K], 16 bits, or int8
    const Grid *scale, *offset;  // [N, groups]
    const float *step;           // [groups], integers alone
    const float *constant;       // [N] or null
    const Out *bias;             // [N] or null
    Out *out;
    int rows, bytes, columns, groups;
    int shift; // pieces that share a scale, as a power of two
    int tiles;
};

struct Barriers {
    u64 full[STAGES], empty[STAGES], scales[TILES_OF_SCALES], scaled[TILES_OF_SCALES], summed[TILES_OF_SUMS];
};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ inline float widened(u16 half_bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half_bits));
    return wide;
}

__device__ inline float grid_value(float x) { return x; }
__device__ inline float grid_value(u16 bits) { return widened(bits); }

__device__ inline float of_bits(u16 bits) {
#ifdef HALF
    return widened(bits);
#else
    return __uint_as_float(static_cast<u32>(bits) << 16);
#endif
}

#ifdef FLOAT
__device__ inline float value(float x) { return x; }
__device__ inline float rounded(float x) { return x; }
#else
__device__ inline float value(u16 bits) { return of_bits(bits); }
__device__ inline u16 rounded(float wide) {
    u16 bits;
    asm("cvt.rn." TYPE ".f32 %0, %1;" : "=h"(bits) : "f"(wide));
    return bits;
}
#endif

// Bytes that lie side by side, to shared memory; they arrive at a barrier.
__device__ inline void bring(u32 target, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// d += a . b: 16 x 16 (16 bits) or 16 x 32 (int8).
__device__ inline void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline void multiply(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// (word >> by) & 0x000F000F | MAGIC in one instruction behind the shift: the compiler would take two.
__device__ inline u32 codes(u32 word, int by) {
    u32 both;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(both) : "r"(word >> by), "r"(MAGIC));
    return both;
}

// The bytes at bits 0 and 16, signed.
__device__ inline u32 signed_bytes(u32 word) {
    u32 low, sign, both;
    asm("lop3.b32 %0, %1, 0x007F007F, %2, 0xEA;" : "=r"(low) : "r"(word), "r"(MAGIC));
    asm("lop3.b32 %0, %1, 0x00800080, %2, 0xEA;" : "=r"(sign) : "r"(word), "r"(MAGIC));
    asm("sub.rn." TYPE "x2 %0, %1, %2;" : "=r"(both) : "r"(low), "r"(sign));
    return both;
}

struct Shares {
    unsigned char *x; // permuted (16 bits) or as it is; pieces in a row
    float *sums;      // of each group of a piece
    float *steps;     // of each group
    float *kept;      // [TILES_OF_SUMS][WARPS][ROWS]
    unsigned char *grids; // [TILES_OF_SCALES][scales of ROWS rows, offsets]
    Barriers *barriers;
    u32 ring;
};

__device__ inline u32 barrier_of(const u64 &barrier) { return shared_address(&barrier); }

// First row in memory of half a tile: rows 0 … 7 or 8 … 15.
__device__ inline int first_row(const Work &w, int tile, int half) {
    return GATED ? tile * 8 + half * (w.rows / 2) : tile * 16 + half * 8;
}

__device__ inline void load_scales(const Work &w, const Shares &to, int tile, int slot) {
    const u32 each = 8 * w.groups * sizeof(Grid), full = barrier_of(to.barriers->scales[slot]);
    const u32 target = shared_address(to.grids) + slot * (OFFSET ? 4 : 2) * each;
    arrive_expecting(full, each * (OFFSET ? 4 : 2));
    for (int half = 0; half < 2; ++half) {
        const long long at = static_cast<long long>(first_row(w, tile, half)) * w.groups;
        bring(target + half * each, w.scale + at, each, full);
        if (OFFSET) bring(target + (2 + half) * each, w.offset + at, each, full);
    }
}

// By one thread. What lies behind a row's end is brought as zeros.
__device__ inline void load(const TensorMap &map, const Work &w, const Shares &to) {
    const int chunks = (w.bytes + CHUNK - 1) / CHUNK;
    int stage = 0, slot = 0;
    u32 parity = 1, scale_parity = 1; // a fresh barrier counts as having ended a phase of parity 1
    for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        wait(barrier_of(to.barriers->scaled[slot]), scale_parity);
        load_scales(w, to, tile, slot);
        if (++slot == TILES_OF_SCALES) slot = 0, scale_parity ^= 1;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const u32 full = barrier_of(to.barriers->full[stage]), target = to.ring + stage * STAGE;
            wait(barrier_of(to.barriers->empty[stage]), parity);
            arrive_expecting(full, STAGE);
            for (int half = 0; half < 2; ++half) {
                for (int i = 0; i < BOXES; ++i)
                    load_box(target + i * BOX + half * (BOX / 2), map, full, (chunk * BOXES + i) * (PITCH / 4),
                             first_row(w, tile, half));
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Four columns of x, from 4 · lane of a piece on, to the words that their products read; gives their sum.
__device__ inline float stage_four(const Work &w, const Shares &to, int number, int lane) {
    const int column = number * 128 + 4 * lane;
    if (INTEGER) {
        const u32 word = column < w.columns ? static_cast<const u32 *>(w.x)[column / 4] : 0;
        reinterpret_cast<u32 *>(to.x)[column / 4] = word;
        return SUMS ? static_cast<float>(__dp4a(static_cast<int>(word), 0x01010101, 0)) : 0.0f;
    }
    uint2 four = {0, 0};
    if (column < w.columns) four = static_cast<const uint2 *>(w.x)[column / 4];
    // thread p of a quad reads 16 words; a product takes two of them, each of two columns that are 2 apart
    const u32 even = __byte_perm(four.x, four.y, 0x5410), odd = __byte_perm(four.x, four.y, 0x7632);
    u32 *piece = reinterpret_cast<u32 *>(to.x) + number * 64;
    if (BITS == 4) { // columns of thread p: 32 p …; a word's lower halves, and 16 columns further its upper ones
        const int place = lane / 8, far = lane % 8 / 4, word = lane % 4;
        piece[place * 16 + word * 4 + far] = even;
        piece[place * 16 + word * 4 + 2 + far] = odd;
    } else { // columns of thread p: 16 p …, and 64 further
        const int load = lane / 16, place = lane % 16 / 4, word = lane % 4;
        piece[place * 16 + load * 8 + word * 2] = even;
        piece[place * 16 + load * 8 + word * 2 + 1] = odd;
    }
    if (!SUMS) return 0.0f;
    return (of_bits(four.x & 0xFFFF) + of_bits(four.x >> 16)) + (of_bits(four.y & 0xFFFF) + of_bits(four.y >> 16));
}

__device__ inline void stage_x(const Work &w, const Shares &to, int pieces) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int number = threadIdx.x / 32; number < pieces; number += WARPS) {
        float sum = stage_four(w, to, number, lane);
        if (SUMS) {
#pragma unroll
            for (int by = 16 / GROUPS; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
            if (lane % (32 / GROUPS) == 0) to.sums[number * GROUPS + lane / (32 / GROUPS)] = sum;
        }
    }
    if (INTEGER) {
        for (int g = threadIdx.x; g < w.groups; g += MULTIPLIERS) to.steps[g] = w.step[g];
    }
    meet(1, MULTIPLIERS);
}

__device__ inline uint4 words(const unsigned char *at) { return *reinterpret_cast<const uint4 *>(at); }

// Of x, what thread `place` multiplies in a piece; quads without a column of their own have zeros.
template <int COUNT>
__device__ inline void x_words(u32 (&b)[4 * COUNT], const unsigned char *at, int stride, bool mine) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        uint4 got = {0, 0, 0, 0};
        if (mine) got = words(at + i * stride);
        b[4 * i] = got.x, b[4 * i + 1] = got.y, b[4 * i + 2] = got.z, b[4 * i + 3] = got.w;
    }
}

// The parts of a piece of two rows of the weight, 16 or 32 bytes of each, as float32: the low row's in columns
// 2 · place and 2 · place + 1, the high row's.
__device__ inline float4 part_of(const unsigned char *low_at, const unsigned char *high_at, const unsigned char *x,
                                 int number, int place, bool mine) {
    constexpr int LOADS = BITS / 4;
#if INTEGER
    u32 b[8];
    x_words<2>(b, x + number * 128 + (BITS == 4 ? 32 : 16) * place, BITS == 4 ? 16 : 64, mine);
    int d[2][4] = {};
#else
    u32 b[16];
    x_words<4>(b, x + number * 256 + 64 * place, 16, mine);
    float d[2][4] = {}; // two, so that a product need not wait for the one before
#endif
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        const uint4 first = words(low_at + 64 * i), second = words(high_at + 64 * i);
        const u32 low[4] = {first.x, first.y, first.z, first.w}, high[4] = {second.x, second.y, second.z, second.w};
#if INTEGER
        if (BITS == 4) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply(d[j % 2], low[j] & 0x0F0F0F0Fu, high[j] & 0x0F0F0F0Fu, (low[j] >> 4) & 0x0F0F0F0Fu,
                         (high[j] >> 4) & 0x0F0F0F0Fu, b[j], b[j + 4]);
        } else {
#pragma unroll
            for (int j = 0; j < 2; ++j)
                multiply(d[j], low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1], b[4 * i + 2 * j],
                         b[4 * i + 2 * j + 1]);
        }
#else
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (BITS == 4) {
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    multiply(d[odd], codes(low[j], 8 * odd), codes(high[j], 8 * odd), codes(low[j], 8 * odd + 4),
                             codes(high[j], 8 * odd + 4), b[4 * j + 2 * odd], b[4 * j + 2 * odd + 1]);
            } else {
                multiply(d[j % 2], signed_bytes(low[j]), signed_bytes(high[j]), signed_bytes(low[j] >> 8),
                         signed_bytes(high[j] >> 8), b[8 * i + 2 * j], b[8 * i + 2 * j + 1]);
            }
        }
#endif
    }
    return {static_cast<float>(d[0][0] + d[1][0]), static_cast<float>(d[0][1] + d[1][1]),
            static_cast<float>(d[0][2] + d[1][2]), static_cast<float>(d[0][3] + d[1][3])};
}

// What a part of a row comes to: scale, offset, step. grid: the row's scale in the part's group; offsets lie `apart`.
__device__ inline float scaled(const Grid *grid, int apart, float part, float sum, float step) {
    const float scale = grid_value(grid[0]);
    float offset = 0.0f;
    if (OFFSET) offset = grid_value(grid[apart]);
    if (INTEGER) return step * (OFFSET ? fmaf(scale, part, offset * sum) : scale * part);
    if (BITS == 4) offset = OFFSET ? fmaf(-RAISED, scale, offset) : (-8.0f - RAISED) * scale;
    return SUMS ? fmaf(scale, part, offset * sum) : scale * part;
}

__device__ inline void finish(const Work &w, const float *kept, int tile) {
    const int mine = threadIdx.x % 32;
    if (mine >= (GATED ? 8 : 16)) return;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < (GATED ? 2 : 1); ++half) {
        const int row = GATED ? first_row(w, tile, half) + mine : tile * 16 + mine;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum[half] += kept[warp * ROWS + 8 * half + mine];
        if (w.constant) sum[half] += w.constant[row];
        if (w.bias) sum[half] += value(w.bias[row]);
    }
    Out result = rounded(sum[0]);
    if (GATED) {
        const float gate = value(result), up = value(rounded(sum[1]));
        result = rounded(gate / (1.0f + __expf(-gate)) * up);
    }
    w.out[tile * (GATED ? 8 : 16) + mine] = result;
}

__device__ inline void multiply_all(const Work &w, const Shares &to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, place = lane % 4;
    const int chunks = (w.bytes + CHUNK - 1) / CHUNK, pieces = (w.columns + 127) / 128;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    stage_x(w, to, pieces);
    int stage = 0, slot = 0, turn = 0;
    u32 parity = 0, scale_parity = 0;
    const int apart = ROWS * w.groups;
    for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x, ++turn) {
        wait(barrier_of(to.barriers->scales[slot]), scale_parity);
        const Grid *grids = reinterpret_cast<const Grid *>(to.grids) + slot * (OFFSET ? 2 : 1) * apart + quad * w.groups;
        // a chunk's pieces go from warp to warp: where they are fewer at a row's end, each has fewer in its turn
        const int mine = (warp + 5 * turn) % WARPS;
        const unsigned char *at = shared + mine * PIECE / PITCH * BOX + quad * PITCH + 16 * place + mine * PIECE % PITCH;
        float low = 0.0f, high = 0.0f;
        for (int number = mine, chunk = 0; chunk < chunks; number += WARPS, ++chunk) {
            wait(barrier_of(to.barriers->full[stage]), parity);
            if (number < pieces) {
                const unsigned char *row = at + stage * STAGE;
                const float4 part = part_of(row, row + 8 * PITCH, to.x, number, place, quad == place * GROUPS / 4);
                if (GROUPS == 1) {
                    const int group = number >> w.shift;
                    const float sum = SUMS ? to.sums[number] : 0.0f, step = INTEGER ? to.steps[group] : 1.0f;
                    low += scaled(grids + group, apart, part.x, sum, step);
                    high += scaled(grids + 8 * w.groups + group, apart, part.z, sum, step);
                } else {
                    const float lows[2] = {part.x, part.y}, highs[2] = {part.z, part.w};
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int group = number * GROUPS + 2 * place + i;
                        if (2 * place < GROUPS && group < w.groups) {
                            low += scaled(grids + group, apart, lows[i], to.sums[group], 1.0f);
                            high += scaled(grids + 8 * w.groups + group, apart, highs[i], to.sums[group], 1.0f);
                        }
                    }
                }
            }
            __syncwarp();
            if (lane == 0) arrive(barrier_of(to.barriers->empty[stage]));
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        // Nobody waits for the others but who adds up, in turn; no warp is more than TILES_OF_SCALES tiles ahead.
        if (GROUPS == 4) {
            low += __shfl_xor_sync(~0u, low, 1);
            high += __shfl_xor_sync(~0u, high, 1);
        }
        float *kept = to.kept + turn % TILES_OF_SUMS * WARPS * ROWS;
        if (place == 0) {
            kept[warp * ROWS + quad] = low;
            kept[warp * ROWS + quad + 8] = high;
        }
        __syncwarp();
        if (lane == 0) {
            arrive(barrier_of(to.barriers->scaled[slot]));
            arrive(barrier_of(to.barriers->summed[turn % TILES_OF_SUMS]));
        }
        if (++slot == TILES_OF_SCALES) slot = 0, scale_parity ^= 1;
        if (warp == turn % WARPS) {
            wait(barrier_of(to.barriers->summed[turn % TILES_OF_SUMS]), turn / TILES_OF_SUMS % 2);
            finish(w, kept, tile);
            __syncwarp();
        }
    }
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1) one_row(const __grid_constant__ TensorMap map,
                                                                         const __grid_constant__ Work w) {
    asm volatile("griddepcontrol.launch_dependents;");
    const int pieces = (w.columns + 127) / 128;
    Shares to;
    to.ring = shared_address(shared);
    to.x = shared + STAGES * STAGE;
    to.sums = reinterpret_cast<float *>(to.x + pieces * (INTEGER ? 128 : 256));
    to.steps = to.sums + pieces * GROUPS;
    to.kept = to.steps + w.groups;
    const u32 used = STAGES * STAGE + pieces * (INTEGER ? 128 : 256) + 4 * (pieces * GROUPS + w.groups + TILES_OF_SUMS * WARPS * ROWS);
    to.barriers = reinterpret_cast<Barriers *>(shared + (used + 15) / 16 * 16);
    to.grids = shared + (used + 15) / 16 * 16 + (sizeof(Barriers) + 15) / 16 * 16;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(barrier_of(to.barriers->full[i]), 1);
            barrier_init(barrier_of(to.barriers->empty[i]), WARPS);
        }
        for (int i = 0; i < TILES_OF_SCALES; ++i) {
            barrier_init(barrier_of(to.barriers->scales[i]), 1);
            barrier_init(barrier_of(to.barriers->scaled[i]), WARPS);
        }
        for (int i = 0; i < TILES_OF_SUMS; ++i) barrier_init(barrier_of(to.barriers->summed[i]), WARPS);
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x < MULTIPLIERS) {
        multiply_all(w, to);
    } else if (threadIdx.x == MULTIPLIERS) {
        load(map, w, to);
    }
}
