// Weight-only int4 GEMM, weights from memory to registers.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N]); with GATED SwiGLU of the two
//     halves of N
// Dtypes: x and out bfloat16 or float16; packed int4 codes; float16 group scales and offsets;
//     float32 accumulators
// Layout: x and out row-major; packed codes as in ops/int4_linear.py; scales and offsets [N,
//     groups]
// Range: 9 ≤ M ≤ 64 where wq_gemm_pipelined.cu does not apply; K a multiple of 32
// Technique: TMA, mbarrier pipeline, wgmma with A in registers, split-K over a thread-block cluster
//     (DSMEM), PDL
// Ops: int4_linear, int4_linear_swiglu (launched by int4_gemm_small_m.py)
//
// One producer thread loads x by TMA, 128 columns per stage. CONSUMERS warpgroups own 64 weight
// rows each; weights go from global memory to registers (PREFETCH K tiles ahead), are dequantized
// there (dequant_int4.cuh) and are the A operand of wgmma in registers, x the B operand in shared
// memory. A thread loads 32 columns of two rows (16 bytes); a 4 x 4 transpose in each quad gives it
// columns 2 p, 2 p + 1, 2 p + 8, 2 p + 9 of four runs, the wgmma fragment.
//
// Per group: out += scale · acc + (offset − MAGIC · scale) · sum(x); the sums of x come from the
// kernel group_sums, launched before. SPLIT blocks of a cluster share K (split-K) and reduce
// through DSMEM in rank order.
//
// Macros: BLOCK_M (rows of x, padded: 32, 64), CONSUMERS, SPLIT, PREFETCH (K tiles of weights in
// flight per warp), STAGES (of x), GATED (tile_rows.cuh), OFFSET (0: symmetric), HALF.
#include "common/cluster.cuh"
#include "weight_only_gemm/dequant_int4.cuh"
#include "common/smem_pipeline.cuh"
#include "weight_only_gemm/tile_rows.cuh"
#include "common/wgmma.cuh"

constexpr int ROWS = 64 * CONSUMERS, CONSUMER_THREADS = 128 * CONSUMERS, COLUMNS = 128;
constexpr int PITCH = ROWS + 4;  // row pitch of the results, without bank conflicts in a quad
// SLAB_BYTES: 64 columns of all rows of x
constexpr u32 SLAB_BYTES = BLOCK_M * 128, STAGE_BYTES = 2 * SLAB_BYTES;
static_assert(STAGES * STAGE_BYTES >= BLOCK_M * PITCH * 4, "the results must fit where x was");
static_assert(BLOCK_M % SPLIT == 0, "each block of a cluster writes BLOCK_M / SPLIT output rows");

struct Work {
    const uint4* weight;
    const u16 *scale, *offset;  // float16 [N, groups]
    const float* sums;          // of x, [groups, BLOCK_M]
    const u16* bias;            // of x's type, or null
    u16* out;
    int tokens, rows, runs, groups, shift, max_groups;  // max_groups: groups of a block at most
};
static_assert(sizeof(Work) == 72, "int4_gemm_small_m.py packs 72 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

#include "weight_only_gemm/int4_gemm_small_m_tile.cuh"

struct Range {
    int begin, end;  // K tiles of 128 columns of this block
};

__device__ inline Range range_of(int rank, int k_tiles) {
    const int each = (k_tiles + SPLIT - 1) / SPLIT;
    return {min(rank * each, k_tiles), min((rank + 1) * each, k_tiles)};
}

__device__ inline void load(const TensorMap& x_map, Barriers& barriers, u32 base, Range range) {
    int stage = 0;
    u32 parity = 1;  // a new barrier behaves as if a phase of parity 1 had completed
    for (int k_tile = range.begin; k_tile < range.end; ++k_tile) {
        mbarrier_wait(shared_address(&barriers.empty[stage]), parity);
        const u32 full = shared_address(&barriers.full[stage]), target = base + stage * STAGE_BYTES;
        mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        tma_load(target, x_map, full, k_tile * COLUMNS, 0);
        tma_load(target + SLAB_BYTES, x_map, full, k_tile * COLUMNS + 64, 0);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Layout of shared memory.
struct Layout {
    float* sums;     // [max_groups][BLOCK_M]
    float2* grids;   // [ROWS][max_groups + 1], {scale, offset}
    float* results;  // [BLOCK_M][PITCH], overwrites x
};

// Copies scales and offsets of the block's rows and groups to shared memory as float32.
__device__ inline void stage_scales(const Work& w, const Layout& to, int tile, int first,
                                    int count) {
    for (int i = threadIdx.x; i < ROWS * count; i += CONSUMER_THREADS) {
        const int local_row = i / count, g = i - local_row * count;
        const long long at =
            static_cast<long long>(weight_row<ROWS>(tile, local_row, w.rows)) * w.groups + first +
            g;
        to.grids[local_row * (w.max_groups + 1) + g] = {
            half_to_float(w.scale[at]), OFFSET ? half_to_float(w.offset[at]) : 0.0f};
    }
}

__device__ inline void consume_tiles(const Work& w, Barriers& barriers, u32 base, const Layout& to,
                                     int tile, Range range) {
    const int lane = threadIdx.x % 32, quad_lane = lane % 4,
              local_row = threadIdx.x / 32 * 16 + lane / 4;
    const WeightPointers at = {
        w.weight + static_cast<long long>(weight_row<ROWS>(tile, local_row, w.rows)) * w.runs +
            quad_lane,
        w.weight + static_cast<long long>(weight_row<ROWS>(tile, local_row + 8, w.rows)) * w.runs +
            quad_lane,
        (w.runs - quad_lane + 3) / 4};
    KTile prefetched[PREFETCH];
#pragma unroll
    for (int s = 0; s < PREFETCH; ++s) {
        if (range.begin + s < range.end) fetch(prefetched[s], at, range.begin + s);
    }
    const int first = range.begin >> w.shift, count = ((range.end - 1) >> w.shift) - first + 1;
    stage_scales(w, to, tile, first, count);
    pdl_wait();
    pdl_launch_dependents();
    for (int i = threadIdx.x; i < count * BLOCK_M; i += CONSUMER_THREADS)
        to.sums[i] = w.sums[first * BLOCK_M + i];
    named_barrier_sync(1, CONSUMER_THREADS);
    float total[BLOCK_M / 2] = {}, part[BLOCK_M / 2];
    const float2 *grid_low = to.grids + local_row * (w.max_groups + 1),
                 *grid_high = grid_low + 8 * (w.max_groups + 1);
    const float2* sums = reinterpret_cast<const float2*>(to.sums) + quad_lane;
    // the other barriers follow at 8 bytes each
    const u32 full = shared_address(&barriers.full[0]);
    const u64 x = k_major_descriptor(base, SWIZZLE_ATOM_BYTES);
    int stage = 0;
    u32 parity = 0;
    for (int start = range.begin; start < range.end; start += PREFETCH) {
#pragma unroll
        for (int s = 0; s < PREFETCH; ++s) {
            const int k_tile = start + s;
            if (k_tile < range.end) {
                const KTile tile_regs = prefetched[s];
                if (k_tile + PREFETCH < range.end) fetch(prefetched[s], at, k_tile + PREFETCH);
                tile_mma(part, tile_regs, x + stage * (STAGE_BYTES / 16), full + 8 * stage, parity,
                         quad_lane);
                if (lane == 0) mbarrier_arrive(full + 8 * (STAGES + stage));
                if (++stage == STAGES) stage = 0, parity ^= 1;
                const int group = (k_tile >> w.shift) - first;
                flush(total, part, grid_low[group], grid_high[group], sums + group * (BLOCK_M / 2));
            }
        }
    }
    named_barrier_sync(1, CONSUMER_THREADS);  // all consumers have read x
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; ++i) {
        const int token = i / 4 * 8 + quad_lane * 2 + i % 2;
        to.results[token * PITCH + local_row + (i % 4 >= 2 ? 8 : 0)] = total[i];
    }
}

__device__ inline float summed(const float* at, const u16* bias, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) sum += SPLIT > 1 ? dsmem_load(at, rank) : *at;
    return bias ? sum + to_float(bias[row]) : sum;
}

// Stores this block's rows of the output, all columns of the tile.
__device__ inline void finish(const Work& w, const float* results, int tile, int rank) {
    constexpr int OUT_COLUMNS = GATED ? ROWS / 2 : ROWS, EACH = BLOCK_M / SPLIT;
    const int columns = GATED ? w.rows / 2 : w.rows;
    for (int i = threadIdx.x; i < EACH * OUT_COLUMNS; i += CONSUMER_THREADS) {
        const int token = rank * EACH + i / OUT_COLUMNS, own = i % OUT_COLUMNS,
                  column = tile * OUT_COLUMNS + own;
        if (token >= w.tokens || column >= columns) continue;
        const float* at = results + token * PITCH + (GATED ? own / 8 * 16 + own % 8 : own);
        u16 result = rounded(summed(at, w.bias, column));
        if (GATED) {
            const u16 up = rounded(summed(at + 8, w.bias, column + columns));
            result = rounded(silu_mul(to_float(result), to_float(up)));
        }
        w.out[static_cast<long long>(token) * columns + column] = result;
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
    __launch_bounds__(CONSUMER_THREADS + 32, 1)
        int4_gemm_small_m(const __grid_constant__ TensorMap x_map, const __grid_constant__ Work w) {
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    const u32 base = shared_address(shared);
    Layout to;
    to.results = reinterpret_cast<float*>(shared);
    to.sums = reinterpret_cast<float*>(shared + STAGES * STAGE_BYTES);
    to.grids = reinterpret_cast<float2*>(to.sums + w.max_groups * BLOCK_M);
    Barriers& barriers = *reinterpret_cast<Barriers*>(to.grids + ROWS * (w.max_groups + 1));
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4);
        fence_mbarrier_init();
    }
    __syncthreads();
    const Range range = range_of(rank, (w.runs + 3) / 4);
    const bool is_consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) < CONSUMERS;
    if (is_consumer) {
        consume_tiles(w, barriers, base, to, tile, range);
    } else {
        pdl_wait();
        if (threadIdx.x % 32 == 0) load(x_map, barriers, base, range);
        __syncwarp();
    }
    // This cluster barrier is relaxed (cluster.cuh). By the memory model the results, which other
    // blocks read after it, need a release; it stays relaxed until the release variant has been
    // measured.
    if (SPLIT > 1)
        cluster_sync_relaxed();
    else if (is_consumer)
        named_barrier_sync(1, CONSUMER_THREADS);
    if (is_consumer) finish(w, to.results, tile, rank);
    // no block may exit while others read its shared memory
    if (SPLIT > 1) cluster_sync_relaxed();
}

struct GroupSumWork {
    const u16* x;
    float* sums;                                 // [groups, BLOCK_M]
    int tokens, columns, stride, groups, group;  // group: columns per group
};
static_assert(sizeof(GroupSumWork) == 40, "int4_gemm_small_m.py packs 40 bytes");

// Sums of x per row and group, one warp per sum: [groups, BLOCK_M] float32.
extern "C" __global__ void __launch_bounds__(256)
    group_sums(const __grid_constant__ GroupSumWork w) {
    pdl_wait();
    pdl_launch_dependents();
    const int at = blockIdx.x * 8 + threadIdx.x / 32, g = at / BLOCK_M, token = at % BLOCK_M;
    if (g >= w.groups) return;
    float sum = 0.0f;
    if (token < w.tokens) {
        const int end = min((g + 1) * w.group, w.columns);
        const u16* row = w.x + static_cast<long long>(token) * w.stride;
        for (int column = g * w.group + threadIdx.x % 32 * 4; column < end; column += 128) {
            const uint2 four = *reinterpret_cast<const uint2*>(row + column);
            sum += (to_float(four.x & 0xFFFF) + to_float(four.x >> 16)) +
                   (to_float(four.y & 0xFFFF) + to_float(four.y >> 16));
        }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) w.sums[at] = sum;
}
