// Fused (residual add +) RMSNorm + 8-bit quantization + column permutation for many rows.
//
// Computes: values[M, COLUMNS] = quantize(rmsnorm(x[M, WIDTH] (+ residual)))[:, perm], with a
//     dynamic scale per token, one static factor, or a factor and zero-point per column
// Dtypes: x bfloat16 or float16; values int8 or e4m3; float32 scales
// Layout: row-major; each row is read and written once
// Range: M ≥ 256; WIDTH and COLUMNS multiples of 16 up to 8,192; perm required
// Technique: bulk async copy, mbarrier pipeline, PDL
// Ops: rms_norm_quant, add_rms_norm_quant (launched by rmsnorm_quant_permute.py)
//
// The permutation goes through shared memory, where gathered words have bank conflicts. So several
// rows are exchanged at once and one word holds all rows of a column: four rows in bytes if all
// columns share a factor (quantized before the exchange), else two rows in 16 bits (quantized after
// it).
//
// Persistent: a block processes every gridDim-th group of rows, which bulk copies load STAGES
// groups ahead. Each thread owns 8 input columns and 8 output columns, whose perm, factor and
// zero-point stay in registers.
//
// Macros: WIDTH (of x; a multiple of 16), COLUMNS (of the values; a multiple of 16), ADD_RESIDUAL,
// PER_TOKEN (dynamic scale per token), PER_COLUMN (a factor per column), ZERO_POINTS, BLOCKS (per
// SM), STAGES, FP8, HALF (float16 instead of bfloat16).
#include "norm_quantize/quantize_8bit.cuh"
#include "common/hopper.cuh"

constexpr bool PACK_BYTES = !PER_COLUMN && !ZERO_POINTS;
constexpr int ROWS = PACK_BYTES ? 4 : 2;
constexpr int COLUMNS_PER_THREAD = 8;  // columns per thread
constexpr int READ_THREADS = WIDTH / COLUMNS_PER_THREAD,
              WRITE_THREADS = COLUMNS / COLUMNS_PER_THREAD;
constexpr int THREADS = READ_THREADS > WRITE_THREADS ? READ_THREADS : WRITE_THREADS,
              BLOCK_THREADS = (THREADS + 31) / 32 * 32, WARPS = BLOCK_THREADS / 32;
constexpr int LANES_PER_ROW = 32 / ROWS;  // lanes per row in the reduction across warps
constexpr int ROW_BYTES = WIDTH * 2, GROUP_BYTES = ROWS * ROW_BYTES,
              STAGE_BYTES = (ADD_RESIDUAL ? 2 : 1) * GROUP_BYTES;

struct Work {
    const uint4 *x, *weight;
    uint4* residual;  // ADD_RESIDUAL: overwritten with the sum
    u32* values;
    float* scale;            // PER_TOKEN
    const float* factor;     // [1], or [COLUMNS] with PER_COLUMN
    const int *zero, *perm;  // [COLUMNS]
    long long rows;
    float eps, qmax;
};
static_assert(sizeof(Work) == 80, "rmsnorm_quant_permute.py packs 80 bytes");

// 4 x 4 byte transpose.
__device__ inline void transpose(u32 (&w)[4]) {
    const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// Warp reduction of ROWS sums at once; lane l ends with the sum of row l / LANES_PER_ROW. Lanes
// split the rows between them, so that several sums cost little more than one.
__device__ inline float reduce_rows(float (&sum)[ROWS], int lane) {
#pragma unroll
    for (int rows = ROWS, step = 16; rows > 1; rows /= 2, step /= 2)
#pragma unroll
        for (int i = 0; i < rows / 2; ++i) {
            const bool upper = lane & step;
            const float send = upper ? sum[i] : sum[i + rows / 2],
                        keep = upper ? sum[i + rows / 2] : sum[i];
            sum[i] = keep + __shfl_xor_sync(~0u, send, step);
        }
    float all = sum[0];
#pragma unroll
    for (int step = LANES_PER_ROW / 2; step > 0; step /= 2) all += __shfl_xor_sync(~0u, all, step);
    return all;
}

// Word index of a column in the exchange buffer: a thread writes four words at once, adjacent to
// those of its neighbours.
__device__ inline u32 exchange_index(int column) {
    return column < 0 ? WIDTH : (column % 8 / 4 * (WIDTH / 8) + column / 8) * 4 + column % 4;
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS)
    rmsnorm_quant_permute(const __grid_constant__ Work work) {
    // STAGES groups of rows, then the exchange buffer
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) u64 arrived[STAGES];
    __shared__ float sums[ROWS][WARPS];
    __shared__ u32 amaxes[ROWS][WARPS];
    // a zero after the columns, for padding columns
    u32* exchange = reinterpret_cast<u32*>(stages + STAGES * STAGE_BYTES);
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool reads = t < READ_THREADS, writes = t < WRITE_THREADS;
    const uint4 zeros = {0, 0, 0, 0};
    const uint4 weight = reads ? work.weight[t] : zeros;
    const u32 w[4] = {weight.x, weight.y, weight.z, weight.w};  // of the input columns
    u32 exchange_offsets[COLUMNS_PER_THREAD / 2];  // byte offsets of two output columns per word
    float factor[PER_COLUMN ? COLUMNS_PER_THREAD : 1], zero[ZERO_POINTS ? COLUMNS_PER_THREAD : 1];
#pragma unroll
    for (int i = 0; i < COLUMNS_PER_THREAD; ++i) {
        const int from = writes ? work.perm[COLUMNS_PER_THREAD * t + i] : -1;
        const u32 offset = 4 * exchange_index(from);
        exchange_offsets[i / 2] = i % 2 == 0 ? offset : exchange_offsets[i / 2] | offset << 16;
        if (PER_COLUMN)
            factor[PER_COLUMN ? i : 0] = from < 0 ? 0.0f : work.factor[COLUMNS_PER_THREAD * t + i];
        if (ZERO_POINTS)
            zero[ZERO_POINTS ? i : 0] =
                from < 0 ? 0.0f : static_cast<float>(work.zero[COLUMNS_PER_THREAD * t + i]);
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
    const float fixed = PER_TOKEN || PER_COLUMN ? 1.0f : work.factor[0];
    auto fetch = [&](long long group, int stage) {  // by one thread
        if (group >= work.rows) return;
        const u32 bytes =
            static_cast<u32>(min(work.rows - group, static_cast<long long>(ROWS))) * ROW_BYTES;
        const u32 barrier = shared_address(arrived + stage),
                  target = shared_address(stages + stage * STAGE_BYTES);
        mbarrier_arrive_expect_tx(barrier, (ADD_RESIDUAL ? 2 : 1) * bytes);
        bulk_load(target, work.x + group * (WIDTH / 8), bytes, barrier);
        if (ADD_RESIDUAL)
            bulk_load(target + GROUP_BYTES, work.residual + group * (WIDTH / 8), bytes, barrier);
    };
    if (t == 0)
        for (int i = 0; i < STAGES; ++i) fetch(first + i * stride, i);
    int stage = 0;
    u32 parity = 0;
    for (; first < work.rows; first += stride) {
        mbarrier_wait(shared_address(arrived + stage), parity);
        const uint4* row = reinterpret_cast<const uint4*>(stages + stage * STAGE_BYTES);
        u32 v[ROWS][4];
        float sum[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sum[i] = 0.0f;
            // rows past the last are undefined and not stored
            const uint4 x = reads ? row[i * READ_THREADS + t] : zeros;
            u32* four = v[i];
            four[0] = x.x, four[1] = x.y, four[2] = x.z, four[3] = x.w;
            if (ADD_RESIDUAL) {
                const uint4 other = reads ? row[(ROWS + i) * READ_THREADS + t] : zeros;
                const u32 o[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    four[j] = rounded_pair(low(four[j]) + low(o[j]), high(four[j]) + high(o[j]));
                if (reads && first + i < work.rows)
                    work.residual[(first + i) * READ_THREADS + t] =
                        make_uint4(four[0], four[1], four[2], four[3]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum[i] += low(four[j]) * low(four[j]) + high(four[j]) * high(four[j]);
        }
        const float own = reduce_rows(sum, lane);
        if (lane % LANES_PER_ROW == 0) sums[lane / LANES_PER_ROW][warp] = own;
        __syncthreads();  // all threads have read the stage
        if (t == 0) fetch(first + STAGES * stride, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i += LANES_PER_ROW)
            if (i + lane % LANES_PER_ROW < WARPS)
                all += sums[lane / LANES_PER_ROW][i + lane % LANES_PER_ROW];
#pragma unroll
        for (int step = LANES_PER_ROW / 2; step > 0; step /= 2)
            all += __shfl_xor_sync(~0u, all, step);
        const float inv_rms = rsqrtf(all / WIDTH + work.eps);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float by = __shfl_sync(~0u, inv_rms, i * LANES_PER_ROW);
            u32 amax = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[i][j] = mul_pairs(rounded_pair(low(v[i][j]) * by, high(v[i][j]) * by), w[j]);
                if (PER_TOKEN) amax = max_abs_pairs(amax, v[i][j]);
            }
            if (PER_TOKEN) {
                amax = __reduce_max_sync(~0u, max(amax & 0xFFFF, amax >> 16));
                if (lane == 0) amaxes[i][warp] = amax;
            }
        }
        float by[ROWS];
        if (PER_TOKEN) {
            __syncthreads();
            u32 amax = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i += LANES_PER_ROW)
                if (i + lane % LANES_PER_ROW < WARPS)
                    amax = max(amax, amaxes[lane / LANES_PER_ROW][i + lane % LANES_PER_ROW]);
#pragma unroll
            for (int step = LANES_PER_ROW / 2; step > 0; step /= 2)
                amax = max(amax, __shfl_xor_sync(~0u, amax, step));
            const float size = fmaxf(low(amax), 1e-6f), inverse = __fdiv_rn(work.qmax, size);
            if (warp == 0 && lane % LANES_PER_ROW == 0 && first + lane / LANES_PER_ROW < work.rows)
                work.scale[first + lane / LANES_PER_ROW] = __fdiv_rn(size, work.qmax);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) by[i] = __shfl_sync(~0u, inverse, i * LANES_PER_ROW);
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) by[i] = fixed;
        }
        u32 word[COLUMNS_PER_THREAD];
#pragma unroll
        for (int j = 0; j < COLUMNS_PER_THREAD; ++j) {
            if constexpr (PACK_BYTES) {
                float y[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    y[i] = scale_to_8bit(j % 2 == 0 ? low(v[i % ROWS][j / 2])
                                                    : high(v[i % ROWS][j / 2]),
                                         by[i % ROWS], 0.0f, work.qmax);
                word[j] = pack_bytes(y[0], y[1], y[2], y[3]);
            } else {
                word[j] = __byte_perm(v[0][j / 2], v[1][j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
            }
        }
        if (reads) {
#pragma unroll
            for (int j = 0; j < COLUMNS_PER_THREAD; j += 4)
                reinterpret_cast<uint4*>(exchange)[j / 4 * READ_THREADS + t] =
                    make_uint4(word[j], word[j + 1], word[j + 2], word[j + 3]);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < COLUMNS_PER_THREAD; ++j) {
            const u32 offset =
                j % 2 == 0 ? exchange_offsets[j / 2] & 0xFFFF : exchange_offsets[j / 2] >> 16;
            word[j] = *reinterpret_cast<const u32*>(
                reinterpret_cast<const unsigned char*>(exchange) + offset);
        }
        u32 out[ROWS][COLUMNS_PER_THREAD / 4];
#pragma unroll
        for (int four = 0; four < COLUMNS_PER_THREAD / 4; ++four) {
            if constexpr (PACK_BYTES) {
                u32 square[4] = {word[4 * four], word[4 * four + 1], word[4 * four + 2],
                                 word[4 * four + 3]};
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
                        y[j] = scale_to_8bit(value,
                                             PER_COLUMN ? factor[PER_COLUMN ? column : 0] : by[i],
                                             zero[ZERO_POINTS ? column : 0], work.qmax);
                    }
                    out[i][four] = pack_bytes(y[0], y[1], y[2], y[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (!writes || first + i >= work.rows) continue;
            u32* values = work.values + (first + i) * (COLUMNS / 4) + t * (COLUMNS_PER_THREAD / 4);
            *reinterpret_cast<uint2*>(values) = make_uint2(out[i][0], out[i][1]);
        }
    }
}
