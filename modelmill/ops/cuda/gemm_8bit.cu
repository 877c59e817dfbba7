// Products of many rows of 8-bit activations with 8-bit weights, scaled where they are stored:
// out[t, n] = sum_k x[t, k] · w[n, k] · x_scale[t] · scale[n] (+ bias[n]).
//
// A block of threads is three warpgroups, one block a multiprocessor. One thread of the first has the copy engine bring
// slabs of 128 columns of x and w into a ring in shared memory, tile after tile without a pause; the other two multiply
// (wgmma) and store. With TAKE_TURNS each of the two has tiles of its own: one stores while the other multiplies. Else
// they share a tile, each half of its rows.
//
// With GATED the rows of w are a gate's and then as many of "up": a tile has both halves of its columns, and
// silu(gate) · up is stored, out [tokens, n / 2].
//
// Macros: MT (times 64 rows of x a warpgroup), BN (rows of w a tile: 32, 64, 128, 192, 256), TAKE_TURNS (0, 1), GATED
// (0, 1), BIAS (0, 1), STAGES, FP8, and the output: HALF (float16), WIDE (float32), else bfloat16.
#include "smem_pipeline.cuh"
#include "wgmma8.cuh"

#ifndef BIAS
#define BIAS 0
#endif
#ifndef GATED
#define GATED 0
#endif

constexpr int THREADS = 384, CONSUMERS = 2, SLAB = 128;
constexpr int MY_ROWS = 64 * MT, BM = TAKE_TURNS ? MY_ROWS : CONSUMERS * MY_ROWS;
constexpr u32 X_BYTES = BM * SLAB, STAGE_BYTES = X_BYTES + BN * SLAB;
constexpr int READERS = TAKE_TURNS ? 4 : 8; // warps that read a stage
constexpr int TURN = 1;                     // named barriers, one a consumer: whose turn it is
constexpr int BAND = 2048 / BM;             // tiles of x that are served together, while they lie in the cache

struct Work {
    const float *scale, *x_scale;
    const void *bias; // of the output's type
    void *out;
    int tokens, n, slabs, each; // each: whether x_scale is one a token; else one for all
};
static_assert(sizeof(Work) == 48, "gemm_8bit.py packs 48 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// Where tile number ``index`` begins: bands of rows of x, and in each all of w, a few rows of w after the other.
__device__ inline void place(const Work &work, int index, int &row, int &column) {
    const int down = (work.tokens + BM - 1) / BM, across = (work.n + BN - 1) / BN;
    const int band = index / (BAND * across), left = index - band * BAND * across;
    const int high = down - band * BAND < BAND ? down - band * BAND : BAND;
    row = (band * BAND + left % high) * BM;
    column = left / high * (GATED ? BN / 2 : BN);
}

__device__ inline int tiles(const Work &work) { return ((work.tokens + BM - 1) / BM) * ((work.n + BN - 1) / BN); }

// Rows of w of a slab into a stage; of a gated tile those of the gate, then as many of up.
__device__ inline void load_weights(u32 target, const TensorMap &map, u32 full, const Work &work, int slab, int column) {
    tma_load(target + X_BYTES, map, full, slab * SLAB, column);
    if (GATED) tma_load(target + X_BYTES + BN / 2 * SLAB, map, full, slab * SLAB, column + work.n / 2);
}

// A warp has read a stage.
__device__ inline void release(u64 &empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty));
}

// Placed before the kernel in front has ended: nothing that it writes, and nothing that it may still read, is touched
// before this returns.
__device__ inline void pdl_enter() {
    pdl_wait();
    pdl_launch_dependents();
}

__device__ void load(const TensorMap &x_map, const TensorMap &w_map, const Work &work, Barriers &barriers) {
    const u32 base = shared_address(shared);
    const int count = tiles(work);
    int row, column;
    place(work, blockIdx.x, row, column);
    // The first weights are on their way before x may be read.
    const int ahead = work.slabs < STAGES ? work.slabs : STAGES;
    for (int slab = 0; slab < ahead; ++slab) {
        const u32 full = shared_address(&barriers.full[slab]);
        mbarrier_arrive_expect_tx(full, STAGE_BYTES);
        load_weights(base + slab * STAGE_BYTES, w_map, full, work, slab, column);
    }
    pdl_enter();
    for (int slab = 0; slab < ahead; ++slab)
        tma_load(base + slab * STAGE_BYTES, x_map, shared_address(&barriers.full[slab]), slab * SLAB, row);
    int stage = ahead % STAGES, first = ahead;
    u32 parity = ahead == STAGES ? 0 : 1;
    for (int index = blockIdx.x; index < count; index += gridDim.x, first = 0) {
        place(work, index, row, column);
        for (int slab = first; slab < work.slabs; ++slab) {
            const u32 target = base + stage * STAGE_BYTES, full = shared_address(&barriers.full[stage]);
            mbarrier_wait(shared_address(&barriers.empty[stage]), parity);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            tma_load(target, x_map, full, slab * SLAB, row);
            load_weights(target, w_map, full, work, slab, column);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ inline float2 read_pair(const float *from) {
    float2 got;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(got.x), "=f"(got.y) : "l"(from));
    return got;
}

// Of four words a lane, word j of lane q becomes word q of lane j, among the four lanes of a quad.
__device__ inline void transpose_quad(u32 (&w)[4], int q) {
    u32 a = __shfl_xor_sync(~0u, q & 1 ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, q & 1 ? w[2] : w[3], 1);
    if (q & 1) w[0] = a, w[2] = b;
    else w[1] = a, w[3] = b;
    a = __shfl_xor_sync(~0u, q & 2 ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, q & 2 ? w[1] : w[3], 2);
    if (q & 2) w[0] = a, w[1] = b;
    else w[2] = a, w[3] = b;
}

// As ``low`` and ``high`` of half_types.cuh, but that float16 is taken apart once: the compiler gives other registers else.
__device__ inline float2 unpacked(u32 both) {
#ifdef HALF
    float2 got;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(got.x), "=f"(got.y)
        : "r"(both));
    return got;
#else
    return {low(both), high(both)};
#endif
}

__device__ inline float2 bias_pair(const Work &work, int column) {
#ifdef WIDE
    return read_pair(static_cast<const float *>(work.bias) + column);
#else
    return unpacked(*reinterpret_cast<const u32 *>(static_cast<const unsigned short *>(work.bias) + column));
#endif
}

// Of two neighbouring sums.
__device__ inline float2 scaled(Sum a, Sum b, float by, float2 scale) {
    return {static_cast<float>(a) * by * scale.x, static_cast<float>(b) * by * scale.y};
}

__device__ inline float2 rounded(float2 v) {
#ifdef WIDE
    return v;
#else
    return unpacked(rounded_pair(v.x, v.y));
#endif
}

// As half_types.cuh's ``gated``, with the fast exponential and the fast division.
__device__ inline float gated_fast(float gate, float up) {
    return __fdividef(gate, 1.0f + exp2_fast(-LOG2E * gate)) * up;
}

constexpr int EIGHTS = BN / 8, WIDTH = GATED ? BN / 2 : BN; // of a tile: eights of columns; columns of out

__device__ inline int columns_of(const Work &work) { return GATED ? work.n / 2 : work.n; }

// Of this thread's two columns in an eight of the tile at ``column``: their row of w. What lies past the end repeats the
// last one.
__device__ inline int row_of(const Work &work, int column, int eight) {
    const int up = GATED && eight >= EIGHTS / 2, columns = columns_of(work);
    const int at = column + 8 * (eight - up * (EIGHTS / 2)) + 2 * (threadIdx.x % 4);
    return (at < columns ? at : columns - 2) + up * columns;
}

// A warpgroup's 64 rows from ``row``; columns of out from ``column``.
__device__ inline void store(const Work &work, Sum (&d)[BN / 2], const float2 (&scale)[EIGHTS], int row, int column) {
    const int lane = threadIdx.x % 32, q = lane % 4, columns = columns_of(work);
    const int first = row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float by[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = first + 8 * half;
        by[half] = work.x_scale[work.each && token < work.tokens ? token : 0];
    }
    auto sums = [&](int eight, int half) {
        float2 v = scaled(d[4 * eight + 2 * half], d[4 * eight + 2 * half + 1], by[half], scale[eight]);
#if BIAS
        const float2 bias = bias_pair(work, row_of(work, column, eight));
        v.x += bias.x, v.y += bias.y;
#endif
        return v;
    };
#pragma unroll
    for (int four = 0; four < WIDTH / 32; ++four) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first + 8 * half;
#ifndef WIDE
            u32 words[4];
#endif
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 v = sums(4 * four + j, half);
#if GATED
                const float2 gate = rounded(v), up = rounded(sums(4 * four + j + EIGHTS / 2, half));
                v = {gated_fast(gate.x, up.x), gated_fast(gate.y, up.y)};
#endif
#ifdef WIDE
                const int at = column + 32 * four + 8 * j + 2 * q;
                if (token < work.tokens && at < columns)
                    *reinterpret_cast<float2 *>(static_cast<float *>(work.out) + u64(token) * columns + at) = v;
#else
                words[j] = rounded_pair(v.x, v.y);
#endif
            }
#ifndef WIDE
            transpose_quad(words, q);
            const int at = column + 32 * four + 8 * q;
            const uint4 eight = {words[0], words[1], words[2], words[3]};
            if (token < work.tokens && at < columns)
                *reinterpret_cast<uint4 *>(static_cast<unsigned short *>(work.out) + u64(token) * columns + at) = eight;
#endif
        }
    }
}

__device__ void multiply(const Work &work, Barriers &barriers, int consumer) {
    const u32 base = shared_address(shared) + (TAKE_TURNS ? 0 : consumer * MY_ROWS * SLAB);
    const int count = tiles(work);
    Sum d[MT][BN / 2];
    float2 scale[EIGHTS];
    int turn = 0;
    // Whoever waits for a stage must have seen it filled the time before: nobody begins before the other has read all
    // that lies in front.
    if (TAKE_TURNS && consumer == 1) named_barrier_arrive(TURN, 256);
    for (int index = blockIdx.x; index < count; index += gridDim.x, ++turn) {
        if (TAKE_TURNS && turn % CONSUMERS != consumer) continue;
        if (TAKE_TURNS) named_barrier_sync(TURN + consumer, 256);
        int row, column;
        place(work, index, row, column);
        if (!TAKE_TURNS) row += consumer * MY_ROWS;
        const int before = turn * work.slabs;
        int stage = before % STAGES, last = 0;
        u32 parity = before / STAGES % 2;
        for (int slab = 0; slab < work.slabs; ++slab) {
            const u64 a = k_major_descriptor(base + stage * STAGE_BYTES, EIGHT_ROWS);
            const u64 b = k_major_descriptor(shared_address(shared) + stage * STAGE_BYTES + X_BYTES, EIGHT_ROWS);
            mbarrier_wait(shared_address(&barriers.full[stage]), parity);
#pragma unroll
            for (int m = 0; m < MT; ++m) wgmma_fence_operand(d[m]);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < SLAB / 32; ++step) // descriptors count in 16 bytes
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    wgmma_8bit(d[m], a + m * (64 * SLAB / 16) + step * 2, b + step * 2, slab + step > 0);
            wgmma_commit();
            if (slab > 0) {
                wgmma_wait<1>();
                release(barriers.empty[last]);
            }
            last = stage;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (TAKE_TURNS && index + gridDim.x < count) named_barrier_arrive(TURN + 1 - consumer, 256);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) scale[eight] = read_pair(work.scale + row_of(work, column, eight));
        wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < MT; ++m) wgmma_fence_operand(d[m]);
        release(barriers.empty[last]);
#pragma unroll
        for (int m = 0; m < MT; ++m) store(work, d[m], scale, row + 64 * m, column);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_8bit(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
    const __grid_constant__ Work work) {
    Barriers &barriers = *reinterpret_cast<Barriers *>(shared + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        barriers.init(READERS);
        fence_mbarrier_init();
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // The producer needs few registers, the others as many as there are: 40 + 2 · 232 = 3 · 168, what the block began with.
    if (group == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) load(x_map, w_map, work, barriers);
    } else {
        setmaxnreg_inc<232>();
        pdl_enter();
        multiply(work, barriers, group - 1);
    }
}
