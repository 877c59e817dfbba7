// W8A8 GEMM for many rows.
//
// Computes: out[M, N] = x[M, K] · w[N, K]ᵀ · x_scale[M] · scale[N] (+ bias[N]); with GATED w is
//     gate and up rows and out[M, N / 2] = silu(gate) · up
// Dtypes: x and w int8 (int32 accumulators) or e4m3 (float32 accumulators); out bfloat16, float16
//     or float32
// Layout: row-major, packed, 16-byte aligned; tiles of 128 columns in shared memory (128-byte
//     swizzle)
// Range: M ≥ 17 (w8a8_linear_swiglu: M ≥ 65, K and N multiples of 16; fp8_linear: 8-bit
//     activations, 17 ≤ M ≤ 2047 where torch has a product for more rows); K a multiple of 16, N of
//     8
// Technique: TMA, mbarrier pipeline, wgmma, pingpong or cooperative warpgroups, named barriers,
//     setmaxnreg, PDL
// Ops: w8a8_linear, w8a8_linear_swiglu, fp8_linear (launched by gemm_8bit.py)
//
// Persistent and warp-specialized, one block per SM: one producer thread fills a pipeline of K
// tiles of 128 columns by TMA across tile boundaries; two consumer warpgroups run wgmma and store.
// With PINGPONG each consumer owns whole tiles: one stores while the other computes (CUTLASS:
// pingpong); otherwise both share a tile, half of its rows each (cooperative).
//
// Macros: MT (64 · MT rows of x per consumer), BN (rows of w per tile: 32, 64, 128, 192, 256),
// PINGPONG (0, 1), GATED (0, 1), BIAS (0, 1), STAGES, FP8, and the output type: HALF (float16),
// OUT_FP32 (float32), else bfloat16.
#include "common/smem_pipeline.cuh"
#include "w8a8_gemm/wgmma8.cuh"

#ifndef BIAS
#    define BIAS 0
#endif
#ifndef GATED
#    define GATED 0
#endif

constexpr int THREADS = 384, CONSUMERS = 2, BLOCK_K = 128;
constexpr int CONSUMER_ROWS = 64 * MT, BM = PINGPONG ? CONSUMER_ROWS : CONSUMERS * CONSUMER_ROWS;
constexpr u32 X_BYTES = BM * BLOCK_K, STAGE_BYTES = X_BYTES + BN * BLOCK_K;
constexpr int READER_WARPS = PINGPONG ? 4 : 8;  // consumer warps that release a stage
// first of two named barriers, one per consumer
constexpr int PINGPONG_BARRIER = 1;
constexpr int BAND = 2048 / BM;  // M tiles that are processed together for L2 reuse

struct Work {
    const float *scale, *x_scale;
    const void* bias;  // of the output type
    void* out;
    int tokens, n, k_tiles, per_token;  // per_token: x_scale is [M], else [1]
};
static_assert(sizeof(Work) == 48, "gemm_8bit.py packs 48 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// First row and column of tile `index`: bands of BAND M tiles; within a band M runs fastest.
__device__ inline void tile_origin(const Work& work, int index, int& row, int& column) {
    const int down = (work.tokens + BM - 1) / BM, across = (work.n + BN - 1) / BN;
    const int band = index / (BAND * across), left = index - band * BAND * across;
    const int high = down - band * BAND < BAND ? down - band * BAND : BAND;
    row = (band * BAND + left % high) * BM;
    column = left / high * (GATED ? BN / 2 : BN);
}

__device__ inline int tiles(const Work& work) {
    return ((work.tokens + BM - 1) / BM) * ((work.n + BN - 1) / BN);
}

// Loads the rows of w of one K tile into a stage; GATED: gate rows, then the matching up rows.
__device__ inline void load_weights(u32 target, const TensorMap& map, u32 full, const Work& work,
                                    int k_tile, int column) {
    tma_load(target + X_BYTES, map, full, k_tile * BLOCK_K, column);
    if (GATED)
        tma_load(target + X_BYTES + BN / 2 * BLOCK_K, map, full, k_tile * BLOCK_K,
                 column + work.n / 2);
}

// This warp has read a stage.
__device__ inline void release(u64& empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty));
}

// PDL: the previous kernel's outputs must not be read, nor its inputs overwritten, before this
// returns.
__device__ inline void pdl_enter() {
    pdl_wait();
    pdl_launch_dependents();
}

__device__ void load(const TensorMap& x_map, const TensorMap& w_map, const Work& work,
                     Barriers& barriers) {
    const u32 base = shared_address(shared);
    const int count = tiles(work);
    int row, column;
    tile_origin(work, blockIdx.x, row, column);
    // PDL: the first weights are loaded before x is available.
    const int ahead = work.k_tiles < STAGES ? work.k_tiles : STAGES;
    for (int k_tile = 0; k_tile < ahead; ++k_tile) {
        const u32 full = shared_address(&barriers.full[k_tile]);
        mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        load_weights(base + k_tile * STAGE_BYTES, w_map, full, work, k_tile, column);
    }
    pdl_enter();
    for (int k_tile = 0; k_tile < ahead; ++k_tile)
        tma_load(base + k_tile * STAGE_BYTES, x_map, shared_address(&barriers.full[k_tile]),
                 k_tile * BLOCK_K, row);
    int stage = ahead % STAGES, first = ahead;
    u32 parity = ahead == STAGES ? 0 : 1;
    for (int index = blockIdx.x; index < count; index += gridDim.x, first = 0) {
        tile_origin(work, index, row, column);
        for (int k_tile = first; k_tile < work.k_tiles; ++k_tile) {
            const u32 target = base + stage * STAGE_BYTES,
                      full = shared_address(&barriers.full[stage]);
            mbarrier_wait(shared_address(&barriers.empty[stage]), parity);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            tma_load(target, x_map, full, k_tile * BLOCK_K, row);
            load_weights(target, w_map, full, work, k_tile, column);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ inline float2 read_pair(const float* from) {
    float2 loaded;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];"
                 : "=f"(loaded.x), "=f"(loaded.y)
                 : "l"(from));
    return loaded;
}

// 4 x 4 transpose in a quad: word j of lane q becomes word q of lane j.
__device__ inline void transpose_quad(u32 (&w)[4], int q) {
    u32 a = __shfl_xor_sync(~0u, q & 1 ? w[0] : w[1], 1),
        b = __shfl_xor_sync(~0u, q & 1 ? w[2] : w[3], 1);
    if (q & 1)
        w[0] = a, w[2] = b;
    else
        w[1] = a, w[3] = b;
    a = __shfl_xor_sync(~0u, q & 2 ? w[0] : w[2], 2),
    b = __shfl_xor_sync(~0u, q & 2 ? w[1] : w[3], 2);
    if (q & 2)
        w[0] = a, w[1] = b;
    else
        w[2] = a, w[3] = b;
}

// low() and high() of half_types.cuh in one asm statement for float16: better register allocation.
__device__ inline float2 unpack_pair(u32 packed) {
#ifdef HALF
    float2 loaded;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(loaded.x), "=f"(loaded.y)
        : "r"(packed));
    return loaded;
#else
    return {low(packed), high(packed)};
#endif
}

__device__ inline float2 bias_pair(const Work& work, int column) {
#ifdef OUT_FP32
    return read_pair(static_cast<const float*>(work.bias) + column);
#else
    return unpack_pair(
        *reinterpret_cast<const u32*>(static_cast<const unsigned short*>(work.bias) + column));
#endif
}

// Dequantizes two adjacent accumulators.
__device__ inline float2 dequantized(Sum a, Sum b, float x_scale, float2 scale) {
    return {static_cast<float>(a) * x_scale * scale.x, static_cast<float>(b) * x_scale * scale.y};
}

__device__ inline float2 rounded(float2 v) {
#ifdef OUT_FP32
    return v;
#else
    return unpack_pair(rounded_pair(v.x, v.y));
#endif
}

// As silu_mul of half_types.cuh, with the fast exponential and division.
__device__ inline float silu_mul_fast(float gate, float up) {
    return __fdividef(gate, 1.0f + exp2_fast(-LOG2E * gate)) * up;
}

// of a tile: chunks of 8 columns; output columns
constexpr int N_CHUNKS = BN / 8, WIDTH = GATED ? BN / 2 : BN;

__device__ inline int columns_of(const Work& work) { return GATED ? work.n / 2 : work.n; }

// Row of w of this thread's two columns in a chunk of the tile at `column`; rows past the end
// repeat the last pair.
__device__ inline int row_of(const Work& work, int column, int chunk) {
    const int up = GATED && chunk >= N_CHUNKS / 2, columns = columns_of(work);
    const int at = column + 8 * (chunk - up * (N_CHUNKS / 2)) + 2 * (threadIdx.x % 4);
    return (at < columns ? at : columns - 2) + up * columns;
}

// Stores a warpgroup's 64 rows from `row`, output columns from `column`.
__device__ inline void store(const Work& work, Sum (&d)[BN / 2], const float2 (&scale)[N_CHUNKS],
                             int row, int column) {
    const int lane = threadIdx.x % 32, q = lane % 4, columns = columns_of(work);
    const int first = row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float x_scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = first + 8 * half;
        x_scale[half] = work.x_scale[work.per_token && token < work.tokens ? token : 0];
    }
    auto sums = [&](int chunk, int half) {
        float2 v = dequantized(d[4 * chunk + 2 * half], d[4 * chunk + 2 * half + 1], x_scale[half],
                               scale[chunk]);
#if BIAS
        const float2 bias = bias_pair(work, row_of(work, column, chunk));
        v.x += bias.x, v.y += bias.y;
#endif
        return v;
    };
#pragma unroll
    for (int four = 0; four < WIDTH / 32; ++four) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first + 8 * half;
#ifndef OUT_FP32
            u32 words[4];
#endif
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 v = sums(4 * four + j, half);
#if GATED
                const float2 gate = rounded(v),
                             up = rounded(sums(4 * four + j + N_CHUNKS / 2, half));
                v = {silu_mul_fast(gate.x, up.x), silu_mul_fast(gate.y, up.y)};
#endif
#ifdef OUT_FP32
                const int at = column + 32 * four + 8 * j + 2 * q;
                if (token < work.tokens && at < columns)
                    *reinterpret_cast<float2*>(static_cast<float*>(work.out) +
                                               u64(token) * columns + at) = v;
#else
                words[j] = rounded_pair(v.x, v.y);
#endif
            }
#ifndef OUT_FP32
            transpose_quad(words, q);
            const int at = column + 32 * four + 8 * q;
            const uint4 chunk = {words[0], words[1], words[2], words[3]};
            if (token < work.tokens && at < columns)
                *reinterpret_cast<uint4*>(static_cast<unsigned short*>(work.out) +
                                          u64(token) * columns + at) = chunk;
#endif
        }
    }
}

__device__ void consume(const Work& work, Barriers& barriers, int consumer) {
    const u32 base = shared_address(shared) + (PINGPONG ? 0 : consumer * CONSUMER_ROWS * BLOCK_K);
    const int count = tiles(work);
    Sum d[MT][BN / 2];
    float2 scale[N_CHUNKS];
    int turn = 0;
    // Parity waits allow a consumer to be at most one phase behind: it starts its tile only after
    // the other consumer has read all stages of the previous tile.
    if (PINGPONG && consumer == 1) named_barrier_arrive(PINGPONG_BARRIER, 256);
    for (int index = blockIdx.x; index < count; index += gridDim.x, ++turn) {
        if (PINGPONG && turn % CONSUMERS != consumer) continue;
        if (PINGPONG) named_barrier_sync(PINGPONG_BARRIER + consumer, 256);
        int row, column;
        tile_origin(work, index, row, column);
        if (!PINGPONG) row += consumer * CONSUMER_ROWS;
        const int before = turn * work.k_tiles;
        int stage = before % STAGES, last = 0;
        u32 parity = before / STAGES % 2;
        for (int k_tile = 0; k_tile < work.k_tiles; ++k_tile) {
            const u64 a = k_major_descriptor(base + stage * STAGE_BYTES, SWIZZLE_ATOM_BYTES);
            const u64 b = k_major_descriptor(shared_address(shared) + stage * STAGE_BYTES + X_BYTES,
                                             SWIZZLE_ATOM_BYTES);
            mbarrier_wait(shared_address(&barriers.full[stage]), parity);
#pragma unroll
            for (int m = 0; m < MT; ++m) wgmma_fence_operand(d[m]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < BLOCK_K / 32; ++step)  // descriptor addresses count 16 bytes
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    wgmma_8bit(d[m], a + m * (64 * BLOCK_K / 16) + step * 2, b + step * 2,
                               k_tile + step > 0);
            wgmma_commit();
            if (k_tile > 0) {
                wgmma_wait<1>();
                release(barriers.empty[last]);
            }
            last = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (PINGPONG && index + gridDim.x < count)
            named_barrier_arrive(PINGPONG_BARRIER + 1 - consumer, 256);
#pragma unroll
        for (int chunk = 0; chunk < N_CHUNKS; ++chunk)
            scale[chunk] = read_pair(work.scale + row_of(work, column, chunk));
        wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < MT; ++m) wgmma_fence_operand(d[m]);
        release(barriers.empty[last]);
#pragma unroll
        for (int m = 0; m < MT; ++m) store(work, d[m], scale, row + 64 * m, column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemm_8bit(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const __grid_constant__ Work work) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        barriers.init(READER_WARPS);
        fence_mbarrier_init();
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // Registers move from the producer to the consumers: 40 + 2 · 232 = 3 · 168, the launch's
    // total.
    if (group == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) load(x_map, w_map, work, barriers);
    } else {
        setmaxnreg_inc<232>();
        pdl_enter();
        consume(work, barriers, group - 1);
    }
}
