// Products of one row of x with 4- or 8-bit weights, as fast as the weights come from memory.
//
// A block stays on its multiprocessor and takes 16 rows of the weight (a tile) after another. One warp has the copy
// engine bring them into a ring of shared memory, 1,024 bytes of each row at a time: that needs no registers and does not
// wait for the kernel in front, so that the ring is full when x is there, and memory is never idle between kernels. The
// other warps multiply, each its pieces of 128 columns, with the weight as the left operand of the tensor cores; x is the
// first column of the right one.
//
// Weights of x's kind (INTEGER 0): y = scale · part + offset · (sum of x), of weights as numbers
// (int4_codes.cuh). Integers (INTEGER 1): y = step · (scale · part + offset · (sum of q)), parts and sums in int32 and below
// 2^24, which float32 holds exactly.
//
// Where a piece has several groups (GROUPS 2 or 4: 64 or 32 columns, 4 bits), each has a column of the right operand of
// its own: there are eight, and the threads of a quad hold different groups' columns.
//
// The loader and what a warp makes of a piece have files of their own. Macros: BITS (of a weight), GROUPS (of a piece: 1, 2,
// 4), INTEGER, GATED (eight rows of a tile are of the gate, the others the same of the half below), OFFSET, STAGES (of the
// ring: as many as there is room for, one_row.py), and those of narrow_types.cuh and numbers.cuh.
#include "int4_codes.cuh"
#include "mma.cuh"
#include "narrow_types.cuh"
#include "ring.cuh"

// Known to one_row.py. Scales arrive up to three tiles ahead; four tiles' sums may wait to be added up, one more than a warp
// can be ahead of the others.
constexpr int WARPS = 16, MULTIPLIERS = 32 * WARPS, ROWS = 16, TILES_OF_SCALES = 3, TILES_OF_SUMS = 4;
// Bytes of a piece; of a row at a time, a piece for each warp; of a row of a box, of which a chunk is one or two wide.
constexpr int PIECE = BITS * 16, CHUNK = WARPS * PIECE, PITCH = 1024, BOXES = CHUNK / PITCH;
constexpr u32 STAGE = ROWS * CHUNK, BOX = ROWS * PITCH;
static_assert(GROUPS == 1 || (BITS == 4 && !INTEGER), "threads hold different groups' columns");
constexpr bool SUMS = INTEGER ? OFFSET : (OFFSET || BITS == 4);

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
static_assert(sizeof(Work) == 80, "one_row.py packs 80 bytes");

struct Barriers {
    u64 full[STAGES], empty[STAGES], scales[TILES_OF_SCALES], scaled[TILES_OF_SCALES], summed[TILES_OF_SUMS];
};

extern __shared__ __align__(1024) unsigned char shared[];

// Where everything lies in shared memory, behind the ring.
struct Layout {
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

#include "one_row_loader.cuh"
#include "one_row_piece.cuh"

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
        if (w.bias) sum[half] += out_value(w.bias[row]);
    }
    Out result = as_out(sum[0]);
    if (GATED) result = as_out(gated(out_value(result), out_value(as_out(sum[1]))));
    w.out[tile * (GATED ? 8 : 16) + mine] = result;
}

__device__ inline void multiply_all(const Work &w, const Layout &to) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4, place = lane % 4;
    const int chunks = (w.bytes + CHUNK - 1) / CHUNK, pieces = (w.columns + 127) / 128;
    after_those_in_front();
    stage_x(w, to, pieces);
    int stage = 0, slot = 0, turn = 0;
    u32 parity = 0, scale_parity = 0;
    const int apart = ROWS * w.groups;
    for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x, ++turn) {
        wait(barrier_of(to.barriers->scales[slot]), scale_parity);
        const Grid *grids = reinterpret_cast<const Grid *>(to.grids) + slot * (OFFSET ? 2 : 1) * apart + quad * w.groups;
        // a chunk's pieces go from warp to warp: where they are fewer at a row's end, each has fewer in its turn
        // (5 and WARPS share no divisor: after 16 tiles every warp has had every place)
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
    let_next_in();
    const int pieces = (w.columns + 127) / 128;
    Layout to;
    to.ring = shared_address(shared);
    to.x = shared + STAGES * STAGE;
    to.sums = reinterpret_cast<float *>(to.x + pieces * (INTEGER ? 128 : 256));
    to.steps = to.sums + pieces * GROUPS;
    to.kept = to.steps + w.groups;
    const u32 used = STAGES * STAGE + pieces * (INTEGER ? 128 : 256) +
                     4 * (pieces * GROUPS + w.groups + TILES_OF_SUMS * WARPS * ROWS);
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
