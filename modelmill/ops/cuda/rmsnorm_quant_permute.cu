// RMSNorm of many rows, of x or of x + residual, rounded to 8 bits with its columns in another order: a row is read and
// written once. What is exchanged between columns goes through shared memory.
//
// A column that is gathered costs a shared-memory access wherever it lies, and gathered words collide in their banks.
// So several rows are exchanged at once: what a column has of them fills one word. With one factor for all columns the
// values are rounded to bytes first, and a word holds four rows; with a factor or a zero-point a column, which belong to
// the column as it is written, the word holds two rows in 16 bits, to which they were rounded anyway.
//
// A block takes every so-many-th group of rows, which the copy engine brings to shared memory STAGES groups ahead: in
// registers a group ahead would not fit. Its threads hold 8 columns of each row as they are read and as many as
// they are written, of which place, factor and zero-point stay in registers from group to group.
//
// Macros: WIDTH (of x; a multiple of 16), COLUMNS (of the values; a multiple of 16), ADD, TOKEN (a scale a token), EACH (a
// factor a column), SHIFT (zero-points), BLOCKS (of a multiprocessor), STAGES, FP8, HALF (float16 for bfloat16).
#include "quantize_8bit.cuh"
#include "hopper.cuh"

constexpr bool BYTES = !EACH && !SHIFT;
constexpr int ROWS = BYTES ? 4 : 2;
constexpr int MINE = 8; // columns of a thread
constexpr int READERS = WIDTH / MINE, WRITERS = COLUMNS / MINE;
constexpr int THREADS = READERS > WRITERS ? READERS : WRITERS, PADDED = (THREADS + 31) / 32 * 32, WARPS = PADDED / 32;
constexpr int SHARE = 32 / ROWS; // lanes that a row gets where warps' results are put together
constexpr int ROW_BYTES = WIDTH * 2, GROUP_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = (ADD ? 2 : 1) * GROUP_BYTES;

struct Work {
    const uint4 *x, *weight;
    uint4 *total; // ADD: the residual, written over with the sum
    u32 *values;
    float *scale;            // TOKEN
    const float *factor;     // [1], or with EACH [COLUMNS]
    const int *zero, *order; // [COLUMNS]
    long long rows;
    float eps, most;
};
static_assert(sizeof(Work) == 80, "rmsnorm_quant_permute.py packs 80 bytes");

// Four words of four bytes with rows and columns exchanged.
__device__ inline void transpose(u32 (&w)[4]) {
    const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// The warp's sums of each row; lane l ends with that of row l / SHARE. The lanes divide the rows while they add, so that
// several sums cost little more than one.
__device__ inline float row_sums(float (&sum)[ROWS], int lane) {
#pragma unroll
    for (int rows = ROWS, step = 16; rows > 1; rows /= 2, step /= 2)
#pragma unroll
        for (int i = 0; i < rows / 2; ++i) {
            const bool upper = lane & step;
            const float given = upper ? sum[i] : sum[i + rows / 2], kept = upper ? sum[i + rows / 2] : sum[i];
            sum[i] = kept + __shfl_xor_sync(~0u, given, step);
        }
    float all = sum[0];
#pragma unroll
    for (int step = SHARE / 2; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
    return all;
}

// Where a column lies in the exchange, in words: a thread writes four at once, beside its neighbours' four.
__device__ inline u32 place(int column) {
    return column < 0 ? WIDTH : (column % 8 / 4 * (WIDTH / 8) + column / 8) * 4 + column % 4;
}

extern "C" __global__ void __launch_bounds__(PADDED, BLOCKS) rmsnorm_quant_permute(const __grid_constant__ Work work) {
    extern __shared__ __align__(128) unsigned char stages[]; // STAGES groups of rows, then the exchange
    __shared__ __align__(8) u64 arrived[STAGES];
    __shared__ float sums[ROWS][WARPS];
    __shared__ u32 tops[ROWS][WARPS];
    u32 *exchange = reinterpret_cast<u32 *>(stages + STAGES * STAGE_BYTES); // behind the columns a zero, for one that is none
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool reads = t < READERS, writes = t < WRITERS;
    const uint4 nothing = {0, 0, 0, 0};
    const uint4 weight = reads ? work.weight[t] : nothing;
    const u32 w[4] = {weight.x, weight.y, weight.z, weight.w}; // of the columns as read
    u32 places[MINE / 2]; // of two columns each as written, in bytes
    float factor[EACH ? MINE : 1], zero[SHIFT ? MINE : 1];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int from = writes ? work.order[MINE * t + i] : -1;
        const u32 offset = 4 * place(from);
        places[i / 2] = i % 2 == 0 ? offset : places[i / 2] | offset << 16;
        if (EACH) factor[EACH ? i : 0] = from < 0 ? 0.0f : work.factor[MINE * t + i];
        if (SHIFT) zero[SHIFT ? i : 0] = from < 0 ? 0.0f : static_cast<float>(work.zero[MINE * t + i]);
    }
    const long long stride = static_cast<long long>(gridDim.x) * ROWS;
    long long first = static_cast<long long>(blockIdx.x) * ROWS;
    if (t == 0) {
        exchange[WIDTH] = 0;
        for (int i = 0; i < STAGES; ++i) mbarrier_init(shared_address(arrived + i), 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    pdl_wait();
    const float fixed = TOKEN || EACH ? 1.0f : work.factor[0];
    auto fetch = [&](long long group, int stage) { // by one thread
        if (group >= work.rows) return;
        const u32 bytes = static_cast<u32>(min(work.rows - group, static_cast<long long>(ROWS))) * ROW_BYTES;
        const u32 barrier = shared_address(arrived + stage), target = shared_address(stages + stage * STAGE_BYTES);
        mbarrier_arrive_expect_tx(barrier, (ADD ? 2 : 1) * bytes);
        bulk_load(target, work.x + group * (WIDTH / 8), bytes, barrier);
        if (ADD) bulk_load(target + GROUP_BYTES, work.total + group * (WIDTH / 8), bytes, barrier);
    };
    if (t == 0)
        for (int i = 0; i < STAGES; ++i) fetch(first + i * stride, i);
    int stage = 0;
    u32 parity = 0;
    for (; first < work.rows; first += stride) {
        mbarrier_wait(shared_address(arrived + stage), parity);
        const uint4 *row = reinterpret_cast<const uint4 *>(stages + stage * STAGE_BYTES);
        u32 v[ROWS][4];
        float sum[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sum[i] = 0.0f;
            // rows behind the last are whatever lies there: nothing of them is written
            const uint4 x = reads ? row[i * READERS + t] : nothing;
            u32 *four = v[i];
            four[0] = x.x, four[1] = x.y, four[2] = x.z, four[3] = x.w;
            if (ADD) {
                const uint4 other = reads ? row[(ROWS + i) * READERS + t] : nothing;
                const u32 o[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] = rounded_pair(low(four[j]) + low(o[j]), high(four[j]) + high(o[j]));
                if (reads && first + i < work.rows)
                    work.total[(first + i) * READERS + t] = make_uint4(four[0], four[1], four[2], four[3]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[i] += low(four[j]) * low(four[j]) + high(four[j]) * high(four[j]);
        }
        const float own = row_sums(sum, lane);
        if (lane % SHARE == 0) sums[lane / SHARE][warp] = own;
        __syncthreads(); // the stage was read by all
        if (t == 0) fetch(first + STAGES * stride, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i += SHARE)
            if (i + lane % SHARE < WARPS) all += sums[lane / SHARE][i + lane % SHARE];
#pragma unroll
        for (int step = SHARE / 2; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
        const float spread = rsqrtf(all / WIDTH + work.eps);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float by = __shfl_sync(~0u, spread, i * SHARE);
            u32 top = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[i][j] = times(rounded_pair(low(v[i][j]) * by, high(v[i][j]) * by), w[j]);
                if (TOKEN) top = larger_sizes(top, v[i][j]);
            }
            if (TOKEN) {
                top = __reduce_max_sync(~0u, max(top & 0xFFFF, top >> 16));
                if (lane == 0) tops[i][warp] = top;
            }
        }
        float by[ROWS];
        if (TOKEN) {
            __syncthreads();
            u32 top = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i += SHARE)
                if (i + lane % SHARE < WARPS) top = max(top, tops[lane / SHARE][i + lane % SHARE]);
#pragma unroll
            for (int step = SHARE / 2; step > 0; step /= 2) top = max(top, __shfl_xor_sync(~0u, top, step));
            const float size = fmaxf(low(top), 1e-6f), inverse = __fdiv_rn(work.most, size);
            if (warp == 0 && lane % SHARE == 0 && first + lane / SHARE < work.rows)
                work.scale[first + lane / SHARE] = __fdiv_rn(size, work.most);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) by[i] = __shfl_sync(~0u, inverse, i * SHARE);
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) by[i] = fixed;
        }
        u32 word[MINE];
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            if constexpr (BYTES) {
                float y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    y[i] = scaled(j % 2 == 0 ? low(v[i % ROWS][j / 2]) : high(v[i % ROWS][j / 2]), by[i % ROWS], 0.0f, work.most);
                word[j] = bytes(y[0], y[1], y[2], y[3]);
            } else {
                word[j] = __byte_perm(v[0][j / 2], v[1][j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
            }
        }
        if (reads) {
#pragma unroll
            for (int j = 0; j < MINE; j += 4)
                reinterpret_cast<uint4 *>(exchange)[j / 4 * READERS + t] =
                    make_uint4(word[j], word[j + 1], word[j + 2], word[j + 3]);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const u32 offset = j % 2 == 0 ? places[j / 2] & 0xFFFF : places[j / 2] >> 16;
            word[j] = *reinterpret_cast<const u32 *>(reinterpret_cast<const unsigned char *>(exchange) + offset);
        }
        u32 out[ROWS][MINE / 4];
#pragma unroll
        for (int four = 0; four < MINE / 4; ++four) {
            if constexpr (BYTES) {
                u32 square[4] = {word[4 * four], word[4 * four + 1], word[4 * four + 2], word[4 * four + 3]};
                transpose(square);
#pragma unroll
                for (int i = 0; i < 4; ++i) out[i % ROWS][four] = square[i];
            } else {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    float y[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int column = 4 * four + j;
                        const float value = i == 0 ? low(word[column]) : high(word[column]);
                        y[j] = scaled(value, EACH ? factor[EACH ? column : 0] : by[i], zero[SHIFT ? column : 0], work.most);
                    }
                    out[i][four] = bytes(y[0], y[1], y[2], y[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (!writes || first + i >= work.rows) continue;
            u32 *values = work.values + (first + i) * (COLUMNS / 4) + t * (MINE / 4);
            *reinterpret_cast<uint2 *>(values) = make_uint2(out[i][0], out[i][1]);
        }
    }
}
