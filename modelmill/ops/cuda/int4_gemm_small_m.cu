// Products of 9 to 64 rows with 4-bit weights: as int4_linear.cu, where the rows are too many to be read by every warp.
//
// The copy engine brings 128 columns of x at a time into shared memory. CONSUMERS warpgroups take 64 rows of the weight
// each, straight from memory into registers, and are the left operand of wgmma there. A thread reads a run of 32 columns
// of two rows, 16 bytes; four threads exchange what they read, so that each has the columns 2 p, 2 p + 1, 2 p + 8 and
// 2 p + 9 of four runs, as wgmma wants them: twelve exchanges for 64 weights, and x needs no order of its own.
//
// y = sum over groups of scale * part + (offset - RAISED * scale) * (sum of x), of codes as dequant_int4.cuh makes numbers of
// them; the sums come from a kernel in front, group_sums.
//
// SPLIT blocks of a cluster share K, and add up in the first one's order at the end.
//
// What becomes of a piece of weights has a file of its own. Macros: BOX (rows of x, padded: 32, 64), CONSUMERS, SPLIT, DEPTH
// (pieces of a warp's weights on their way), STAGES (of x), GATED (tile_rows.cuh), OFFSET (0: symmetric), HALF.
#include "cluster.cuh"
#include "dequant_int4.cuh"
#include "smem_pipeline.cuh"
#include "tile_rows.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 64 * CONSUMERS, MULTIPLIERS = 128 * CONSUMERS, COLUMNS = 128;
constexpr int PITCH = ROWS + 4; // of the results: columns of a quad then lie in different banks
constexpr u32 SLAB = BOX * 128, STAGE = 2 * SLAB; // a slab: 64 columns of all rows of x
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
static_assert(sizeof(Work) == 72, "int4_gemm_small_m.py packs 72 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

#include "int4_gemm_small_m_tile.cuh"

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
        mbarrier_wait(shared_address(&barriers.empty[stage]), parity);
        const u32 full = shared_address(&barriers.full[stage]), target = base + stage * STAGE;
        mbarrier_arrive_expect_tx(full, STAGE);
        tma_load(target, x_map, full, number * COLUMNS, 0);
        tma_load(target + SLAB, x_map, full, number * COLUMNS + 64, 0);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Where everything lies in shared memory.
struct Layout {
    float *sums;    // [share][BOX]
    float2 *grids;  // [ROWS][share + 1]
    float *results; // [BOX][PITCH], where x was
};

// Scales and offsets of the block's rows and groups; the sums of x when it is there.
__device__ inline void stage_scales(const Work &w, const Layout &to, int tile, int first, int count) {
    for (int i = threadIdx.x; i < ROWS * count; i += MULTIPLIERS) {
        const int mine = i / count, g = i - mine * count;
        const long long at = static_cast<long long>(weight_row<ROWS>(tile, mine, w.rows)) * w.groups + first + g;
        to.grids[mine * (w.share + 1) + g] = {widened(w.scale[at]), OFFSET ? widened(w.offset[at]) : 0.0f};
    }
}

__device__ inline void consume_tiles(const Work &w, Barriers &barriers, u32 base, const Layout &to, int tile, Range range) {
    const int lane = threadIdx.x % 32, place = lane % 4, mine = threadIdx.x / 32 * 16 + lane / 4;
    const Place at = {w.weight + static_cast<long long>(weight_row<ROWS>(tile, mine, w.rows)) * w.runs + place,
                      w.weight + static_cast<long long>(weight_row<ROWS>(tile, mine + 8, w.rows)) * w.runs + place,
                      (w.runs - place + 3) / 4};
    KTile ahead[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        if (range.begin + s < range.end) fetch(ahead[s], at, range.begin + s);
    }
    const int first = range.begin >> w.shift, count = ((range.end - 1) >> w.shift) - first + 1;
    stage_scales(w, to, tile, first, count);
    pdl_wait();
    pdl_launch_dependents();
    for (int i = threadIdx.x; i < count * BOX; i += MULTIPLIERS) to.sums[i] = w.sums[first * BOX + i];
    named_barrier_sync(1, MULTIPLIERS);
    float total[BOX / 2] = {}, part[BOX / 2];
    const float2 *grid_low = to.grids + mine * (w.share + 1), *grid_high = grid_low + 8 * (w.share + 1);
    const float2 *sums = reinterpret_cast<const float2 *>(to.sums) + place;
    const u32 full = shared_address(&barriers.full[0]); // the others follow
    const u64 x = k_major_descriptor(base, EIGHT_ROWS);
    int stage = 0;
    u32 parity = 0;
    for (int start = range.begin; start < range.end; start += DEPTH) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int number = start + s;
            if (number < range.end) {
                const KTile piece = ahead[s];
                if (number + DEPTH < range.end) fetch(ahead[s], at, number + DEPTH);
                products(part, piece, x + stage * (STAGE / 16), full + 8 * stage, parity, place);
                if (lane == 0) mbarrier_arrive(full + 8 * (STAGES + stage));
                if (++stage == STAGES) stage = 0, parity ^= 1;
                const int group = (number >> w.shift) - first;
                flush(total, part, grid_low[group], grid_high[group], sums + group * (BOX / 2));
            }
        }
    }
    named_barrier_sync(1, MULTIPLIERS); // nobody reads x any more
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) {
        const int token = i / 4 * 8 + place * 2 + i % 2;
        to.results[token * PITCH + mine + (i % 4 >= 2 ? 8 : 0)] = total[i];
    }
}

__device__ inline float summed(const float *at, const u16 *bias, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) sum += SPLIT > 1 ? dsmem_load(at, rank) : *at;
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
            const u16 up = rounded(summed(at + 8, w.bias, column + columns));
            result = rounded(gated(value(result), value(up)));
        }
        w.out[static_cast<long long>(token) * columns + column] = result;
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(MULTIPLIERS + 32, 1)
    int4_gemm_small_m(const __grid_constant__ TensorMap x_map, const __grid_constant__ Work w) {
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    const u32 base = shared_address(shared);
    Layout to;
    to.results = reinterpret_cast<float *>(shared);
    to.sums = reinterpret_cast<float *>(shared + STAGES * STAGE);
    to.grids = reinterpret_cast<float2 *>(to.sums + w.share * BOX);
    Barriers &barriers = *reinterpret_cast<Barriers *>(to.grids + ROWS * (w.share + 1));
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    const Range range = range_of(rank, (w.runs + 3) / 4);
    const bool multiplier = __shfl_sync(~0u, threadIdx.x / 128, 0) < CONSUMERS;
    if (multiplier) {
        consume_tiles(w, barriers, base, to, tile, range);
    } else {
        pdl_wait();
        if (threadIdx.x % 32 == 0) load(x_map, barriers, base, range);
        __syncwarp();
    }
    // The meeting is a relaxed one (cluster.cuh): by the memory model the results, which other blocks read behind it, want a
    // release. It is left as it was measured, until it can be measured with one.
    if (SPLIT > 1)
        cluster_sync_relaxed();
    else if (multiplier)
        named_barrier_sync(1, MULTIPLIERS);
    if (multiplier) finish(w, to.results, tile, rank);
    if (SPLIT > 1) cluster_sync_relaxed(); // a block that ended could not be read
}

struct GroupSumWork {
    const u16 *x;
    float *sums; // [groups, BOX]
    int tokens, columns, stride, groups, group; // group: columns of it
};
static_assert(sizeof(GroupSumWork) == 40, "int4_gemm_small_m.py packs 40 bytes");

// The sum of each row of x in each group; a warp for each.
extern "C" __global__ void __launch_bounds__(256) group_sums(const __grid_constant__ GroupSumWork w) {
    pdl_wait();
    pdl_launch_dependents();
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
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) w.sums[at] = sum;
}
