// Grouped weight-only GEMM of a mixture of experts, few rows for each expert.
//
// Computes: GATED: inner[position, N] = act(x · gateᵀ) · (x · upᵀ) of the sorted pairs of a token
//     and its expert, gate and up [N, K] of the expert; else pairs[pair, N] = inner · downᵀ
//     (+ bias), down [N, K]
// Dtypes: x and out bfloat16 or float16; packed int4 codes with float16 scales and offsets, e2m1
//     codes with e8m0 scales (bfloat16), or int8 with a float32 scale per row; float32 accumulators
// Layout: row-major; weights [E, N, K], codes packed as in ops/int4_linear.py; scales and offsets
//     [E, N, groups]; positions as moe_align_block_size sorts them, blocks of 8 · TOKEN_TILES
// Range: 4 ≤ M ≤ 512 tokens (mxfp4_fused_moe: 2 ≤ M ≤ 512) of at most 64 pairs an expert on
//     average, of int8 16, and 3 blocks of pairs; N and K multiples of 32, K up to about 8,000, of
//     int8 4,000
// Technique: persistent blocks, bulk async copy, mbarrier pipeline, mma.sync m16n8k16, PDL
// Ops: int4_fused_moe, int8_fused_moe, mxfp4_fused_moe (launched by grouped_gemm_wq.py)
//
// The unit of work is a stage: 16 · ROW_TILES weight rows of one expert with all their columns,
// which lie side by side in memory, times one block of sorted pairs. A stage is independent of all
// others, so the stages of all blocks that have pairs are divided evenly among the grid's blocks;
// how many there are is read from expert_ids on the device. WARPS warps divide K: each holds its
// columns of the pairs' x in registers as B fragments, loaded once for a block of pairs, and
// multiplies its columns of every row of the stage. The warps' sums meet in shared memory, in one
// of two buffers; the warps take turns to add them, apply the epilogue and store, while the others
// go on. As soon as all have read a stage, the last thread copies another into its place, across
// experts.
//
// A stage is two copies of the weight's rows, and two of each operand beside it, since every copy
// costs the issuing thread tens of instructions. Two blocks of pairs share CHUNK stages in turn, so
// that an expert with two blocks finds the weights in L2 the second time.
//
// Macros: those of moe_fragments.cuh, N (columns of the output), STAGES, BLOCKS (per SM), CHUNK,
// GATED, BIAS, GATE (moe_activation.cuh).
#include "common/smem_pipeline.cuh"
#include "moe/moe_activation.cuh"
#include "moe/moe_fragments.cuh"

constexpr int THREADS = 32 * WARPS, ROWS = 16 * ROW_TILES, PAIRS = 8 * TOKEN_TILES;
constexpr int OUT_COLUMNS = GATED ? HALF_ROWS : ROWS;  // of a stage
constexpr int STAGES_PER_BLOCK = N / OUT_COLUMNS;      // that a block of pairs is multiplied with
constexpr int UNITS = ROW_TILES * TOKEN_TILES;         // sums of 16 rows and 8 pairs in a stage
// Stage: weights, scales, offsets, biases; each in two halves, GATED: gate and up.
constexpr int SCALE_AT = HALF_AT + HALF_ROWS * ROW_BYTES, OFFSET_AT = SCALE_AT + ROWS * SCALE_BYTES,
              BIAS_AT = OFFSET_AT + (OFFSET ? ROWS * SCALE_BYTES : 0),
              STAGE_BYTES = BIAS_AT + (BIAS ? ROWS * 2 : 0), COPIED_BYTES = STAGE_BYTES - SKEW;
static_assert(HALF_ROWS * SCALE_BYTES % 16 == 0, "scales are copied in multiples of 16 bytes");
static_assert(WARPS * TILES_PER_WARP * K_TILE == K, "the warps divide the K tiles evenly");
static_assert(STAGES_PER_BLOCK % CHUNK == 0 && N % OUT_COLUMNS == 0, "no stage is a part");
// Where the epilogue reads a stage, too, another takes its place a stage later.
constexpr int REFILL_LAG = BIAS || FORMAT == INT8;
static_assert(STAGES > 1 + REFILL_LAG, "a stage is loaded while another one is read");

struct Work {
    const unsigned char *weight, *scale, *offset, *bias;
    const u16* x;
    u16* out;
    const int *sorted_ids, *expert_ids;
    int pairs, blocks, top_k, x_stride;
    float alpha, limit;  // of the clamped gate
};
static_assert(sizeof(Work) == 88, "grouped_gemm_wq.py packs 88 bytes");

extern __shared__ __align__(1024) unsigned char shared[];

// Shared memory behind the ring.
struct Exchange {
    float4 partial[2][UNITS][WARPS][32];
    float2 sums[WARPS][TILES_PER_WARP][TOKEN_TILES][4];
    int pairs[2][PAIRS];
    // full: a stage's bytes have landed; ready: all warps have written the sums of a buffer, and
    // read their stage; added: they have been added up.
    u64 full[STAGES], ready[2], added[2];
};

struct Range {
    int begin, end, live;  // stages of this block, and blocks of pairs that have an expert
};

// The blocks of pairs that have an expert come first; every warp counts them for itself.
__device__ inline Range range_of(const Work& w) {
    int live = 0;
    for (int i = threadIdx.x % 32; i < w.blocks; i += 32) live += w.expert_ids[i] >= 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) live += __shfl_xor_sync(~0u, live, step);
    const long long stages = static_cast<long long>(live) * STAGES_PER_BLOCK;
    return {static_cast<int>(stages * blockIdx.x / gridDim.x),
            static_cast<int>(stages * (blockIdx.x + 1) / gridDim.x), live};
}

struct Position {
    int block, stage;  // block of pairs, stage of its expert
};

__device__ inline Position position_of(int index, int live) {
    const int both = index / (2 * STAGES_PER_BLOCK), within = index % (2 * STAGES_PER_BLOCK);
    if (2 * both + 1 == live) return {2 * both, within};
    const int chunk = within / (2 * CHUNK), rest = within % (2 * CHUNK);
    return {2 * both + rest / CHUNK, chunk * CHUNK + rest % CHUNK};
}

// The thread that copies stages into the ring.
struct Producer {
    const Work& w;
    Exchange& exchange;
    Range range;
    int next, slot = 0, block = -1;
    long long first = 0;  // row of the block's expert in the stacked weights

    // Copies half of the rows of one operand.
    __device__ static void load(u32 target, const unsigned char* from, int row_bytes, long long row,
                                u32 full) {
        bulk_load(target, from + row * row_bytes, HALF_ROWS * row_bytes, full);
    }

    __device__ void load_next() {
        if (next >= range.end) return;
        const Position at = position_of(next++, range.live);
        if (at.block != block) {
            block = at.block;
            first = static_cast<long long>(w.expert_ids[block]) * (GATED ? 2 * N : N);
        }
        const u32 full = shared_address(&exchange.full[slot]),
                  stage = shared_address(shared) + slot * STAGE_BYTES;
        if (++slot == STAGES) slot = 0;
        mbarrier_arrive_expect_tx(full, COPIED_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long row = first + at.stage * OUT_COLUMNS + half * (GATED ? N : HALF_ROWS);
            const int local = half * HALF_ROWS;
            load(stage + half * HALF_AT, w.weight, ROW_BYTES, row, full);
            load(stage + SCALE_AT + local * SCALE_BYTES, w.scale, SCALE_BYTES, row, full);
            if (OFFSET)
                load(stage + OFFSET_AT + local * SCALE_BYTES, w.offset, SCALE_BYTES, row, full);
            if (BIAS) load(stage + BIAS_AT + local * 2, w.bias, 2, row, full);
        }
    }
};

struct Consumer {
    const Work& w;
    Exchange& exchange;
    int warp, lane, quad, quad_lane;
    Fragments x;
    int block = -1, live_tiles = 0, parity = 0;  // parity: of the list of pairs in shared memory

    // Loads this warp's columns of x for a block of pairs; of positions without a pair zeros.
    __device__ void load_block(int next) {
        block = next, parity ^= 1;
        const int* ids = w.sorted_ids + static_cast<long long>(block) * PAIRS;
        for (int i = threadIdx.x; i < PAIRS; i += THREADS) exchange.pairs[parity][i] = ids[i];
        const u16* rows[TOKEN_TILES];
        live_tiles = 0;
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
            const int pair = ids[8 * n + quad];
            // the pairs of a block come first in it
            live_tiles += ids[8 * n] < w.pairs;
            const long long row = GATED ? pair / w.top_k : block * PAIRS + 8 * n + quad;
            rows[n] = pair < w.pairs ? w.x + row * w.x_stride : nullptr;
        }
        x.load(rows, warp * TILES_PER_WARP, quad_lane);
        if (USES_SUMS) {
#pragma unroll
            for (int t = 0; t < TILES_PER_WARP; ++t)
#pragma unroll
                for (int n = 0; n < TOKEN_TILES; ++n) {
                    const float2 sum = x.sum(t, n);
                    if (quad == 0) exchange.sums[warp][t][n][quad_lane] = sum;
                }
            __syncwarp();
        }
    }

    // Quads of odd numbers have the rows of a fragment in the other order: so the rows of two
    // quads that read at once begin in different banks.
    __device__ int low_row(int tile) const { return quad % 2 * HALF_ROWS + 8 * tile + quad; }
    __device__ int high_row(int tile) const { return (1 - quad % 2) * HALF_ROWS + 8 * tile + quad; }

    // This warp's part of all rows of a stage, for the first LIVE tiles of pairs.
    template <int LIVE> __device__ void multiply(const unsigned char* stage, int buffer) {
#pragma unroll 1
        for (int tile = 0; tile < ROW_TILES; ++tile) {
            float total[LIVE][4] = {};
            const RowPair<SCALE_AT, OFFSET_AT> rows = {stage, low_row(tile), high_row(tile)};
#pragma unroll
            for (int t = 0; t < TILES_PER_WARP; ++t)
                multiply_tile<LIVE>(total, rows, warp * TILES_PER_WARP + t, x.b[t], quad_lane,
                                    exchange.sums[warp][t]);
#pragma unroll
            for (int n = 0; n < LIVE; ++n)
                exchange.partial[buffer][tile * TOKEN_TILES + n][warp][lane] = {
                    total[n][0], total[n][1], total[n][2], total[n][3]};
        }
    }

    // Adds the warps' sums of 16 rows and 8 pairs, and stores the outputs.
    __device__ void finish(const unsigned char* stage, int buffer, int unit, int stage_index) {
        const int tile = unit / TOKEN_TILES, n = unit % TOKEN_TILES;
        float sum[4] = {};
#pragma unroll
        for (int k = 0; k < WARPS; ++k) {
            const float4 part = exchange.partial[buffer][unit][k][lane];
            sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
        }
        const int rows[2] = {8 * tile + quad, HALF_ROWS + 8 * tile + quad};
        const bool swapped = quad % 2;
        float halves[2][2] = {{swapped ? sum[2] : sum[0], swapped ? sum[3] : sum[1]},
                              {swapped ? sum[0] : sum[2], swapped ? sum[1] : sum[3]}};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float scale = CODE_SCALE, bias = 0.0f;
            if (FORMAT == INT8)
                scale = reinterpret_cast<const float*>(stage + SCALE_AT)[rows[half]];
            if (BIAS) bias = to_float(reinterpret_cast<const u16*>(stage + BIAS_AT)[rows[half]]);
#pragma unroll
            for (int c = 0; c < 2; ++c) halves[half][c] = halves[half][c] * scale + bias;
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int local = 8 * n + 2 * quad_lane + c, pair = exchange.pairs[parity][local];
            if (pair >= w.pairs) continue;
            const long long row = GATED ? block * PAIRS + local : pair;
            u16* out = w.out + row * N + stage_index * OUT_COLUMNS;
            const u16 first = rounded(halves[0][c]), second = rounded(halves[1][c]);
            if (GATED)
                out[rows[0]] =
                    rounded(activated(to_float(first), to_float(second), w.alpha, w.limit));
            else
                out[rows[0]] = first, out[rows[1]] = second;
        }
    }

    // Waits at one of the buffers' barriers for stage number `done` of this block.
    __device__ static void wait_for(const u64 (&barriers)[2], int done) {
        mbarrier_wait(shared_address(&barriers[done % 2]), done / 2 % 2);
    }

    __device__ void arrive(const u64 (&barriers)[2], int done) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&barriers[done % 2]));
    }

    __device__ void run(Range range, Producer& producer) {
        PipelineState<STAGES> state;
        int turn = warp;  // which of a stage's sums this warp adds first
        for (int done = 0; range.begin + done < range.end; ++done, state.advance()) {
            const Position at = position_of(range.begin + done, range.live);
            // the buffer, and the list of the pairs of the block before the last one, are free
            if (done > 1) wait_for(exchange.added, done - 2);
            if (at.block != block) load_block(at.block);
            const unsigned char* stage = shared + state.stage * STAGE_BYTES;
            mbarrier_wait(shared_address(&exchange.full[state.stage]), state.parity);
            if (TOKEN_TILES > 1 && live_tiles <= TOKEN_TILES / 2)
                multiply<(TOKEN_TILES + 1) / 2>(stage, done % 2);
            else
                multiply<TOKEN_TILES>(stage, done % 2);
            arrive(exchange.ready, done);
            if (threadIdx.x == THREADS - 1 && done >= REFILL_LAG) {
                wait_for(REFILL_LAG ? exchange.added : exchange.ready, done - REFILL_LAG);
                producer.load_next();
            }
            for (int unit = turn; unit < UNITS; unit += WARPS) {
                wait_for(exchange.ready, done);
                if (unit % TOKEN_TILES < live_tiles) finish(stage, done % 2, unit, at.stage);
                arrive(exchange.added, done);
            }
            turn = (turn + WARPS - UNITS % WARPS) % WARPS;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    grouped_gemm_wq(const __grid_constant__ Work w) {
    Exchange& exchange = *reinterpret_cast<Exchange*>(shared + STAGES * STAGE_BYTES);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage)
            mbarrier_init(shared_address(&exchange.full[stage]), 1);
        for (int buffer = 0; buffer < 2; ++buffer) {
            mbarrier_init(shared_address(&exchange.ready[buffer]), WARPS);
            mbarrier_init(shared_address(&exchange.added[buffer]), UNITS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    // The second product finds expert_ids, which the kernel before the one in front wrote, and
    // loads weights while the first one ends.
    if (GATED) pdl_wait();
    const Range range = range_of(w);
    Producer producer = {w, exchange, range, range.begin};
    if (threadIdx.x == THREADS - 1)
        for (int i = 0; i < STAGES; ++i) producer.load_next();
    if (!GATED) pdl_wait();
    pdl_launch_dependents();
    Consumer consumer = {w, exchange, warp, lane, lane / 4, lane % 4, {}};
    consumer.run(range, producer);
}
