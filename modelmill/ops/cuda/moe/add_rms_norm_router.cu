// Residual add, RMSNorm, a mixture's router and its choice of experts for few tokens.
//
// Computes: total[M, K] = x[M, K] (+ residual); out[M, K] = rmsnorm(total) · weight;
//     logits[M, E] = out · routerᵀ · scale (+ bias); weights[M, TOP_K] and ids[M, TOP_K] of the
//     largest scores
// Dtypes: x, residual, weights and router bfloat16 or float16; logits, scores and weights float32;
//     ids int32
// Layout: row-major
// Range: M ≤ 4; K a multiple of 8 up to 4,096; E ≤ 128; no groups of experts, no sum_eps
// Technique: thread-block cluster (DSMEM), GEMV with the router's rows in registers before
//     griddepcontrol.wait, PDL
// Ops: add_rms_norm_router
//
// A cluster has one token; its blocks divide the experts. Each block computes the whole row of the
// norm, since that takes less time than to wait for another block's. Each warp has its expert's
// row of the router in registers before the kernel in front has ended: in shared memory,
// of which the kernels of a decode step leave little, a block could not begin so early. All logits
// are sent to the first block, which chooses: the rank of an expert is the number of experts in
// front of it. Of equal scores the lower id comes first; a score of NaN ranks last, so that every
// slot gets a valid id.
//
// The first block alone writes the row and the sum. The sum lies over the residual, which a block
// has read before it sends a logit; a block without experts sends none, and what it reads is not
// used.
//
// Macros: K, EXPERTS, TOP_K, ADDS (whether there is a residual), SIGMOID (else softmax),
// RENORMALIZE, ROUTER_BIAS (of x's type), SELECTION_BIAS (float32), HALF.
#include "common/cluster.cuh"
#include "common/half_types.cuh"

constexpr int BLOCKS = 8, THREADS = 512, WARPS = THREADS / 32;
constexpr int EACH = (EXPERTS + BLOCKS - 1) / BLOCKS;  // experts of a block
constexpr int CHUNKS = K / 8, CHUNKS_PER_THREAD = (CHUNKS + THREADS - 1) / THREADS,
              CHUNKS_PER_LANE = (CHUNKS + 31) / 32;
constexpr int LANES_PER_EXPERT = EXPERTS <= 16 ? 32 : EXPERTS <= 32 ? 16 : EXPERTS <= 64 ? 8 : 4;
static_assert(K % 8 == 0 && EACH <= WARPS && TOP_K <= 32, "see the range");

struct Work {
    const uint4 *x, *norm_weight, *router;
    uint4 *residual, *out;  // residual: overwritten with the sum
    const u16* router_bias;
    const float* selection_bias;
    float* topk_weights;
    int* topk_ids;
    float eps, logit_scale, weight_scale;
};
static_assert(sizeof(Work) == 88, "add_rms_norm_router.py packs 88 bytes");

struct Exchange {
    uint4 row[CHUNKS];
    float sums[WARPS], logits[EXPERTS], scores[EXPERTS], ranked[EXPERTS], chosen[TOP_K];
    int ids[TOP_K];
    u64 logits_full;
};

// This thread's chunks of 8 columns of the stream, and their squares' sum.
struct Row {
    u32 pairs[CHUNKS_PER_THREAD][4];

    __device__ float read(const Work& w, long long at) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_THREAD; ++i) {
            const int chunk = i * THREADS + threadIdx.x;
            const uint4 zeros = {0, 0, 0, 0};
            const uint4 x = chunk < CHUNKS ? w.x[at + chunk] : zeros,
                        other = ADDS && chunk < CHUNKS ? w.residual[at + chunk] : zeros;
            const u32 first[4] = {x.x, x.y, x.z, x.w},
                      second[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32& pair = pairs[i][j] = first[j];
                if (ADDS)
                    pair = rounded_pair(low(pair) + low(second[j]), high(pair) + high(second[j]));
                squares += low(pair) * low(pair) + high(pair) * high(pair);
            }
        }
        return squares;
    }

    __device__ void store(uint4* to) const {
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_THREAD; ++i) {
            const int chunk = i * THREADS + threadIdx.x;
            if (chunk < CHUNKS) to[chunk] = {pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]};
        }
    }

    // Normalised: rounded, then times the weight.
    __device__ void scale(float by, const uint4 (&weight)[CHUNKS_PER_THREAD]) {
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_THREAD; ++i) {
            const u32 factors[4] = {weight[i].x, weight[i].y, weight[i].z, weight[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 normal = rounded_pair(low(pairs[i][j]) * by, high(pairs[i][j]) * by);
                pairs[i][j] =
                    rounded_pair(low(normal) * low(factors[j]), high(normal) * high(factors[j]));
            }
        }
    }
};

// A warp's row of the router, 16 bytes a lane at a time.
struct RouterRow {
    uint4 chunks[CHUNKS_PER_LANE];

    __device__ void load(const uint4* row) {
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_LANE; ++i) {
            const int chunk = i * 32 + threadIdx.x % 32;
            chunks[i] = chunk < CHUNKS ? __ldg(row + chunk) : uint4{0, 0, 0, 0};
        }
    }

    __device__ float dot(const uint4* x) const {
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < CHUNKS_PER_LANE; ++i) {
            const uint4 other = x[min(i * 32 + static_cast<int>(threadIdx.x % 32), CHUNKS - 1)];
            const u32 first[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w},
                      second[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sums[j] += low(first[j]) * low(second[j]) + high(first[j]) * high(second[j]);
        }
        return warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
};

// The sum of each thread's value over the block.
__device__ inline float block_sum(float value, float* sums) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < WARPS ? sums[threadIdx.x % 32] : 0.0f);
}

// Sends the logit of this warp's expert.
__device__ inline void send_logit(const Work& w, Exchange& exchange, const RouterRow& row,
                                  int expert) {
    float logit = row.dot(exchange.row) * w.logit_scale;
    if (threadIdx.x % 32 > 0) return;
    if (ROUTER_BIAS) logit += to_float(w.router_bias[expert]);
    dsmem_store_async(logit, shared_address(&exchange.logits[expert]),
                      shared_address(&exchange.logits_full), 0);
}

// Scores of all experts, and what they are ranked by.
__device__ inline void score_experts(const Work& w, Exchange& exchange) {
    float largest = 0.0f, total = 1.0f;
    if (!SIGMOID) {  // every warp by itself
        largest = __int_as_float(0xff800000), total = 0.0f;
        for (int i = threadIdx.x % 32; i < EXPERTS; i += 32)
            largest = fmaxf(largest, exchange.logits[i]);
        largest = warp_max(largest);
        for (int i = threadIdx.x % 32; i < EXPERTS; i += 32)
            total += __expf(exchange.logits[i] - largest);
        total = warp_sum(total);
    }
    for (int i = threadIdx.x; i < EXPERTS; i += THREADS) {
        const float logit = exchange.logits[i];
        const float score =
            SIGMOID ? 1.0f / (1.0f + __expf(-logit)) : __expf(logit - largest) / total;
        const float ranked = SELECTION_BIAS ? score + w.selection_bias[i] : score;
        exchange.scores[i] = score;
        exchange.ranked[i] = ranked == ranked ? ranked : __int_as_float(0xff800000);
    }
    __syncthreads();
}

// The experts with the largest scores, in descending order.
__device__ inline void choose_experts(const Work& w, Exchange& exchange, int token) {
    const int part = threadIdx.x % LANES_PER_EXPERT, expert = threadIdx.x / LANES_PER_EXPERT;
    const float own = exchange.ranked[min(expert, EXPERTS - 1)];
    int in_front = 0;
#pragma unroll 8
    for (int other = part; other < EXPERTS; other += LANES_PER_EXPERT) {
        const float ranked = exchange.ranked[other];
        in_front += ranked > own || (ranked == own && other < expert);
    }
#pragma unroll
    for (int by = LANES_PER_EXPERT / 2; by > 0; by /= 2)
        in_front += __shfl_xor_sync(~0u, in_front, by);
    if (expert < EXPERTS && part == 0 && in_front < TOP_K)
        exchange.chosen[in_front] = exchange.scores[expert], exchange.ids[in_front] = expert;
    __syncthreads();
    if (threadIdx.x >= TOP_K) return;
    float weight = exchange.chosen[threadIdx.x], total = 0.0f;
    if (RENORMALIZE) {
        for (int i = 0; i < TOP_K; ++i) total += exchange.chosen[i];
        weight /= total;
    }
    w.topk_weights[token * TOP_K + threadIdx.x] = weight * w.weight_scale;
    w.topk_ids[token * TOP_K + threadIdx.x] = exchange.ids[threadIdx.x];
}

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    add_rms_norm_router(const __grid_constant__ Work w) {
    __shared__ __align__(16) Exchange exchange;
    const int rank = cluster_rank(), token = blockIdx.x / BLOCKS;
    const int first = rank * EACH, count = max(0, min(EACH, EXPERTS - first));
    const u32 logits_full = shared_address(&exchange.logits_full);
    const int warp = threadIdx.x / 32;
    RouterRow router_row;
    if (warp < count) router_row.load(w.router + (first + warp) * CHUNKS);
    if (threadIdx.x == 0) {
        mbarrier_init(logits_full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(logits_full, 4 * EXPERTS);
    }
    __syncwarp();
    cluster_arrive_relaxed();
    uint4 weight[CHUNKS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < CHUNKS_PER_THREAD; ++i)
        weight[i] = w.norm_weight[min(i * THREADS + static_cast<int>(threadIdx.x), CHUNKS - 1)];
    pdl_wait();
    pdl_launch_dependents();
    const long long at = static_cast<long long>(token) * CHUNKS;
    Row stream;
    const float squares = block_sum(stream.read(w, at), exchange.sums);
    Row normed = stream;
    normed.scale(rsqrtf(squares / K + w.eps), weight);
    normed.store(exchange.row);
    if (rank == 0) normed.store(w.out + at);
    cluster_wait();  // the first block's barriers are there
    __syncthreads();
    if (warp < count) send_logit(w, exchange, router_row, first + warp);
    if (rank > 0) return;
    mbarrier_wait(logits_full, 0);
    if (ADDS) stream.store(w.residual + at);
    score_experts(w, exchange);
    choose_experts(w, exchange, token);
}
