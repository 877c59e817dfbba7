// The experts of one token in MXFP4: two products over the rows of the chosen experts.
//
// Computes: GATED: inner[top_k, N] = act(x · gateᵀ + bias) · (x · upᵀ + bias), gate and up [N, K]
// of
//     each chosen expert; else out[N] = Σ topk_weights · (inner · downᵀ + bias) (+ shared), down
//     [N, K]
// Dtypes: x and out bfloat16; e2m1 codes with e8m0 scales; float32 accumulators
// Layout: row-major; weights [E, N, K], codes packed as in ops/mxfp4_linear.py; scales
//     [E, N, K / 32]; inner as fragments (below), times 2^64, X_PAD columns between experts
// Range: M = 1 token; top_k ≤ 16; N and K multiples of 64; two stages of a team fit in shared
//     memory; output rows of a block at most its threads; x and inner below 2^63, no NaN scale
// Technique: warp specialization, bulk async copy, mbarrier pipeline, mma.sync m16n8k16, weights
//     before griddepcontrol.wait, PDL
// Ops: mxfp4_fused_moe (launched by moe_decode_mxfp4.py)
//
// A stage is 8 rows of two matrices of the same K columns: of gate and up of one expert, or of the
// down matrices of two experts. The rows of all chosen experts are divided evenly among the blocks.
// A producer warp copies a block's stages into rings, as many ahead as there is room for. The
// second product knows the experts from the kernel before the first one, and has its first stages
// loaded when the first one ends.
//
// The other warps form WAYS teams; the WARPS of a team divide K. A team takes every WAYS-th stage
// of the first product, and in the second one every WAYS-th pair of experts. It has a ring of its
// own. The 8 rows of the first matrix and the 8 rows of the second are the A fragment of mma.sync;
// its B fragment has the x of the first matrix in even columns and the x of the second in odd ones,
// so that every thread gets the sums of the row of its quad. They wait in shared memory for the end
// of the block, which adds those of all warps. So no warp waits for another one before that.
//
// x lies in shared memory in the order of the B fragments; the first product stores its output in
// this order. In registers it would leave room for half as many warps, and what takes time is the
// latency of converting codes.
//
// A scale's 32 columns are a K tile, and their sum is multiplied by it. Codes are read 2^126 too
// small (moe_fragments.cuh), x is multiplied by 2^64, the whole by 2^62. Converting codes keeps the
// integer units busy, half as many as there are for floats: so scales are applied in float32.
//
// Macros: those of moe_fragments.cuh (FORMAT, ROW_TILES and TOKEN_TILES are 1, K_TILE 32), N,
// TOP_K, WAYS, RING (stages of a team), OUTPUT_TILES_PER_BLOCK (at most; of 8 output rows), GATED,
// BIAS, SHARED, GATE (moe_activation.cuh).
#include "common/smem_pipeline.cuh"
#include "moe/moe_activation.cuh"
#include "moe/moe_fragments.cuh"

static_assert(ROW_TILES == 1 && TOKEN_TILES == 1, "a stage is one A fragment high");
static_assert(TILES_PER_WARP * K_TILE * WARPS == K, "the warps divide the K tiles evenly");
static_assert(FORMAT == E2M1 && K_TILE == 32, "a K tile has one scale");
constexpr int TEAM_WARPS = WARPS * WAYS, THREADS = 32 * (TEAM_WARPS + 1), ROWS = 8,
              STAGES = RING * WAYS;
constexpr int OUTPUT_TILES_PER_MATRIX = N / ROWS,
              NUM_OUTPUT_TILES = GATED ? TOP_K * OUTPUT_TILES_PER_MATRIX : OUTPUT_TILES_PER_MATRIX;
constexpr int PARTS = GATED ? 1 : (TOP_K + 1) / 2;  // stages of an output tile
// Stage: weights, scales; each in two halves.
constexpr int SCALE_AT = HALF_AT + ROWS * ROW_BYTES,
              STAGE_BYTES = SCALE_AT + 2 * ROWS * SCALE_BYTES,
              HALF_BYTES = (STAGE_BYTES - SKEW) / 2;  // that are copied
static_assert(GATED || WAYS <= PARTS, "each team has experts");
static_assert(ROWS * SCALE_BYTES % 16 == 0, "scales are copied in multiples of 16 bytes");
constexpr int X_PAD = 32;  // columns, so that two experts' x begin in different banks
constexpr u32 TWO_TO_64_PAIR = 0x5F805F80u;
constexpr float TWO_TO_64 = 18446744073709551616.0f, TWO_TO_62 = TWO_TO_64 / 4;

struct Work {
    const unsigned char *weight, *scale;
    const u16 *bias, *x, *shared_output;
    const float* topk_weights;
    const int* ids;
    u16* out;
    float alpha, limit;  // of the clamped gate
};
static_assert(sizeof(Work) == 72, "moe_decode_mxfp4.py packs 72 bytes");

extern __shared__ __align__(1024) unsigned char shared[];

// Shared memory behind the rings.
struct Exchange {
    u16 x[GATED ? K : TOP_K * (K + X_PAD)];
    // of an output tile, its rows; of both matrices, where each has an output of its own
    float partial[OUTPUT_TILES_PER_BLOCK][GATED ? WARPS : TEAM_WARPS][GATED ? 2 : 1][ROWS];
    u64 x_full[PARTS];  // the inputs of two experts have landed
    PipelineBarriers<STAGES> stages;
};

struct Range {
    int begin, end;  // output tiles of this block
    __device__ int size() const { return end - begin; }
};

__device__ inline Range range_of_block() {
    return {
        static_cast<int>(static_cast<long long>(NUM_OUTPUT_TILES) * blockIdx.x / gridDim.x),
        static_cast<int>(static_cast<long long>(NUM_OUTPUT_TILES) * (blockIdx.x + 1) / gridDim.x)};
}

// A stage of the block: output tile `output_tile` of its range and part `part` of it.
struct Stage {
    int output_tile, part, team, turn;  // turn: how many stages the team has before it

    __device__ Stage(int output_tile, int part, int output_tiles)
        : output_tile(output_tile), part(part), team((GATED ? output_tile : part) % WAYS),
          turn(GATED ? output_tile / WAYS : part / WAYS * output_tiles + output_tile) {}
    __device__ int slot() const { return team * RING + turn % RING; }
    __device__ u32 parity() const { return turn / RING % 2; }
};

// Copies stages; all lanes of a warp call it.
struct Producer {
    const Work& w;
    Exchange& exchange;
    Range range;
    int lane, id;  // lane i knows the i-th expert

    // Row of the stacked matrices where a half of a stage begins.
    __device__ long long first_row(int output_tile, int part, int half) const {
        if (GATED) {
            const int expert = __shfl_sync(~0u, id, output_tile / OUTPUT_TILES_PER_MATRIX);
            return expert * (2ll * N) + half * N + output_tile % OUTPUT_TILES_PER_MATRIX * ROWS;
        }
        const int expert = __shfl_sync(~0u, id, min(2 * part + half, TOP_K - 1));
        return expert * static_cast<long long>(N) + output_tile * ROWS;
    }

    // Lanes 0 to 3 copy half of the weights or of the scales each.
    __device__ void load(const Stage& at) const {
        const u32 full = shared_address(&exchange.stages.full[at.slot()]),
                  stage = shared_address(shared) + at.slot() * STAGE_BYTES;
        const int halves = GATED || 2 * at.part + 1 < TOP_K ? 2 : 1, half = lane % 2;
        const long long even = first_row(range.begin + at.output_tile, at.part, 0),
                        odd = first_row(range.begin + at.output_tile, at.part, 1),
                        row = half ? odd : even;
        if (lane == 0) mbarrier_arrive_expect_tx(full, halves * HALF_BYTES);
        __syncwarp();
        if (lane >= 4 || half >= halves) return;
        const bool scales = lane >= 2;
        const int row_bytes = scales ? SCALE_BYTES : ROW_BYTES,
                  at_byte = scales ? SCALE_AT + half * (ROWS * SCALE_BYTES) : half * HALF_AT;
        bulk_load(stage + at_byte, (scales ? w.scale : w.weight) + row * row_bytes,
                  ROWS * row_bytes, full);
    }

    // Loads the stages that have a place from the beginning, or the others, each when the stage in
    // its place has been read.
    __device__ void load_all(bool first) const {
#pragma unroll 1
        for (int base = 0; base < PARTS; base += WAYS)
#pragma unroll 1
            for (int output_tile = 0; output_tile < range.size(); ++output_tile)
#pragma unroll 1
                for (int part = base; part < min(base + WAYS, PARTS); ++part) {  // team by team
                    const Stage at(output_tile, part, range.size());
                    if ((at.turn < RING) != first) continue;
                    if (!first)
                        mbarrier_wait(shared_address(&exchange.stages.empty[at.slot()]),
                                      at.parity() ^ 1);
                    load(at);
                }
    }
};

// x in the order of B fragments. Columns 0, 2 and columns 1, 3 of four are words, as a code's word
// has them. Of a K tile each thread of a quad has four words side by side: its four columns of the
// first half of the tile, and of the second.
__device__ inline int fragment_word(int four, int odd) {
    return four / 8 * 16 + four % 4 * 4 + 2 * odd + four % 8 / 4;
}

// Where a column of x lies.
__device__ inline int fragment_column(int column) {
    return 2 * fragment_word(column / 4, column % 2) + column % 4 / 2;
}

// Brings the token's x in order; all threads of a block call it.
__device__ inline void order_x(u32* to, const u16* from) {
    for (int four = threadIdx.x; four < K / 4; four += THREADS) {
        const uint2 columns = reinterpret_cast<const uint2*>(from)[four];
        u32 even, odd;
        Fragments::split(even, odd, columns.x, columns.y);
        to[fragment_word(four, 0)] = multiply_pairs(even, TWO_TO_64_PAIR);
        to[fragment_word(four, 1)] = multiply_pairs(odd, TWO_TO_64_PAIR);
    }
}

struct Consumer {
    const Work& w;
    Exchange& exchange;
    Range range;
    int team, warp, lane, quad, quad_lane;  // warp: within its team

    // Of the sums of a thread, those of its quad's row of both matrices. Quads of odd numbers have
    // the rows of the fragment in the other order: so the rows of two quads that read at once begin
    // in different banks.
    __device__ float2 own(const float (&sum)[4]) const {
        return {quad % 2 ? sum[2] : sum[0], quad % 2 ? sum[1] : sum[3]};
    }

    // This warp's part of a stage: of the quad's row of the first and of the second matrix.
    // x: of the matrix that the quad has in its B fragments.
    __device__ float2 multiply(const unsigned char* stage, const u16* x) const {
        const int low_row = quad % 2 * ROWS + quad, high_row = (1 - quad % 2) * ROWS + quad;
        const RowPair<SCALE_AT, 0> rows = {stage, low_row, high_row};
        float total[4] = {};
#pragma unroll
        for (int t = 0; t < TILES_PER_WARP; ++t) {
            const int tile = warp * TILES_PER_WARP + t, thread = tile * 4 + quad_lane;
            u32 low = reinterpret_cast<const u32*>(rows.weights(low_row))[thread],
                high = reinterpret_cast<const u32*>(rows.weights(high_row))[thread];
            const uint4 b = reinterpret_cast<const uint4*>(x)[thread];
            float part[4] = {};
            mma(part, small_e2m1_pair<0>(low), small_e2m1_pair<0>(high), small_e2m1_pair<1>(low),
                small_e2m1_pair<1>(high), b.x, b.y);
            low >>= 8, high >>= 8;
            mma(part, small_e2m1_pair<0>(low), small_e2m1_pair<0>(high), small_e2m1_pair<1>(low),
                small_e2m1_pair<1>(high), b.z, b.w);
            // of both rows for both matrices: a choice would take as long as these products
            const float scales[2] = {e8m0_scale(stage, low_row, tile),
                                     e8m0_scale(stage, high_row, tile)};
#pragma unroll
            for (int i = 0; i < 4; ++i) total[i] += scales[i / 2] * part[i];
        }
        const float2 sums = own(total);
        return {sums.x * TWO_TO_62, sums.y * TWO_TO_62};
    }

    // 2^(code − 127)
    __device__ static float e8m0_scale(const unsigned char* stage, int row, int tile) {
        return __uint_as_float(stage[SCALE_AT + row * SCALE_BYTES + tile] * (1u << 23));
    }

    // Waits for a stage, multiplies it and gives its place back.
    __device__ float2 run_stage(const Stage& at, const u16* x) const {
        mbarrier_wait(shared_address(&exchange.stages.full[at.slot()]), at.parity());
        const float2 sum = multiply(shared + at.slot() * STAGE_BYTES, x);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&exchange.stages.empty[at.slot()]));
        return sum;
    }

    // The first product: an output tile is a stage.
    __device__ void run_gate_up() const {
#pragma unroll 1
        for (int output_tile = team; output_tile < range.size(); output_tile += WAYS) {
            const float2 sum = run_stage(Stage(output_tile, 0, range.size()), exchange.x);
            if (quad_lane < 2)
                exchange.partial[output_tile][warp][GATED ? quad_lane : 0][quad] =
                    quad_lane ? sum.y : sum.x;
        }
    }

    // The second one: an output tile is the stages of all experts, which have their x in common.
    __device__ void run_down() const {
        const float weight = lane < TOP_K ? w.topk_weights[lane] : 0.0f;
#pragma unroll 1  // code is read once here, and it is a part of the time
        for (int part = team; part < PARTS; part += WAYS) {
            const float first_weight = __shfl_sync(~0u, weight, 2 * part),
                        second_weight = __shfl_sync(~0u, weight, 2 * part + 1);
            const bool both = 2 * part + 1 < TOP_K;
            const u16* x = exchange.x + (2 * part + (both ? quad % 2 : 0)) * (K + X_PAD);
            mbarrier_wait(shared_address(&exchange.x_full[part]), 0);
#pragma unroll 1
            for (int output_tile = 0; output_tile < range.size(); ++output_tile) {
                const float2 sum = run_stage(Stage(output_tile, part, range.size()), x);
                // the second is of an older stage where there is none
                const float both_sums =
                    first_weight * sum.x + (both ? second_weight * sum.y : 0.0f);
                float& total = exchange.partial[output_tile][team * WARPS + warp][0][quad];
                if (quad_lane == 0) total = part == team ? both_sums : total + both_sums;
            }
        }
    }
};

// The biases of an output row: of gate and up, or those of down, weighted, in the first.
__device__ inline float2 bias_of(const Work& w, int output_tile, int row) {
    float2 bias = {0.0f, 0.0f};
    if (GATED) {
        const long long at = w.ids[output_tile / OUTPUT_TILES_PER_MATRIX] * (2ll * N) +
                             output_tile % OUTPUT_TILES_PER_MATRIX * ROWS + row;
        bias = {to_float(w.bias[at]), to_float(w.bias[at + N])};
    } else {
#pragma unroll
        for (int i = 0; i < TOP_K; ++i) {
            const long long at = w.ids[i] * static_cast<long long>(N) + output_tile * ROWS + row;
            bias.x += w.topk_weights[i] * to_float(w.bias[at]);
        }
    }
    return bias;
}

// Adds the warps' sums of an output row, and stores it.
__device__ inline void store(const Work& w, const Exchange& exchange, int local, int output_tile,
                             int row, float2 bias) {
    float2 sum = bias;
#pragma unroll
    for (int k = 0; k < (GATED ? WARPS : TEAM_WARPS); ++k) {
        sum.x += exchange.partial[local][k][0][row];
        if (GATED) sum.y += exchange.partial[local][k][GATED][row];
    }
    const int at = output_tile * ROWS + row;
    if (GATED) {
        const float inner =
            activated(to_float(rounded(sum.x)), to_float(rounded(sum.y)), w.alpha, w.limit);
        w.out[at / N * (N + X_PAD) + fragment_column(at % N)] =
            rounded(to_float(rounded(inner)) * TWO_TO_64);
    } else {
        w.out[at] = rounded(SHARED ? sum.x + to_float(w.shared_output[at]) : sum.x);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    moe_decode_mxfp4(const __grid_constant__ Work w) {
    Exchange& exchange = *reinterpret_cast<Exchange*>(shared + STAGES * STAGE_BYTES);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        exchange.stages.init(WARPS);
        for (int part = 0; part < PARTS; ++part)
            mbarrier_init(shared_address(&exchange.x_full[part]), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const Range range = range_of_block();
    if (GATED) pdl_wait();
    const bool produces = warp == TEAM_WARPS;
    const Producer producer = {w, exchange, range, lane, lane < TOP_K ? w.ids[lane] : 0};
    if (produces) producer.load_all(true);
    // the thread that will store a row reads its biases now
    const int local = threadIdx.x / ROWS, row = threadIdx.x % ROWS;
    float2 bias = {0.0f, 0.0f};
    if (BIAS && local < range.size()) bias = bias_of(w, range.begin + local, row);
    if (GATED) {
        order_x(reinterpret_cast<u32*>(exchange.x), w.x);
        __syncthreads();
    }
    const Consumer consumer = {w,    exchange, range,   warp / WARPS, warp % WARPS,
                               lane, lane / 4, lane % 4};
    if (produces) {
        if (!GATED) pdl_wait();
        pdl_launch_dependents();
        if (!GATED && lane < PARTS) {
            const u32 full = shared_address(&exchange.x_full[lane]);
            const int from = 2 * lane * (K + X_PAD),
                      bytes = 2 * (K + X_PAD) * min(2, TOP_K - 2 * lane);
            mbarrier_arrive_expect_tx(full, bytes);
            bulk_load(shared_address(exchange.x + from), w.x + from, bytes, full);
        }
        producer.load_all(false);
    } else if (GATED) {
        consumer.run_gate_up();
    } else {
        consumer.run_down();
    }
    __syncthreads();
    if (local < range.size()) store(w, exchange, local, range.begin + local, row, bias);
}
