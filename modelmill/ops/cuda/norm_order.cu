// RMSNorm of many rows, of x or of x + residual, rounded to 8 bits with its columns in another order: a row is read and
// written once. What is exchanged between columns goes through shared memory in 16 bits, in which it was rounded anyway.
//
// A block takes every so-many-th row. Its threads hold 16 columns of a row each as they are read, and 16 columns as they
// are written, of which order, factor and zero-point stay in registers from row to row. The next row is on its way
// while one is computed.
//
// Macros: WIDTH (of x; a multiple of 16), COLUMNS (of the values; a multiple of 16), ADD, TOKEN (a scale a token), EACH (a
// factor a column), SHIFT (zero-points), BLOCKS (of a multiprocessor), FP8, HALF (float16 for bfloat16).
#include "numbers.cuh"

constexpr int THREADS = (WIDTH > COLUMNS ? WIDTH : COLUMNS) / 16, PADDED = (THREADS + 31) / 32 * 32, WARPS = PADDED / 32;
constexpr int READERS = WIDTH / 16, WRITERS = COLUMNS / 16;

struct Work {
    const uint4 *x, *weight;
    uint4 *total; // ADD: the residual, written over with the sum
    uint4 *values;
    float *scale;                // TOKEN
    const float *factor;         // [1], or with EACH [COLUMNS]
    const int *zero, *order;     // [COLUMNS]
    long long rows, x_stride, total_stride; // strides in 16 bytes
    float eps, most;
};
static_assert(sizeof(Work) == 96, "norm_order.py packs 96 bytes");

// As numbers.cuh's ``high``, by a shift: in float16 the compiler makes other code of the two, and this is what was measured.
__device__ inline float upper(u32 pair) { return low(pair >> 16); }

// Products of pairs, rounded once: of two 16-bit numbers that is what float32 and a rounding give.
__device__ inline u32 times(u32 a, u32 b) {
    u32 both;
    asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
    return both;
}

// The larger sizes of two pairs: without their signs, numbers are in the order of their bits.
__device__ inline u32 larger_sizes(u32 a, u32 b) {
    return __vmaxu2(a, b & 0x7FFF7FFFu);
}

__device__ inline float warp_most(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Two values as e4m3, the first in the lower byte.
__device__ inline u32 fp8_pair(float first, float second) {
    u16 both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}

// Four bytes of four floats that were raised to 1.5 · 2²³: their lowest bits are whole numbers.
__device__ inline u32 bytes(float a, float b, float c, float d) {
    const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
    const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(ab, cd, 0x5410);
}

// What a thread keeps of its 16 columns of the values.
struct Columns {
    u32 place[8]; // offsets in a row of two columns each; of a column that is none, that of the zero behind it
    float factor[EACH ? 16 : 1], zero[SHIFT ? 16 : 1];
};

// A column of the values, not yet a byte.
__device__ inline float column(const Columns &kept, const unsigned char *row, int i, float by, float most) {
    const u32 offset = i % 2 == 0 ? kept.place[i / 2] & 0xFFFF : kept.place[i / 2] >> 16;
    const float y = low(*reinterpret_cast<const u16 *>(row + offset));
    const float factor = EACH ? kept.factor[EACH ? i : 0] : by;
#ifdef FP8
    return fminf(fmaxf(y * factor, -most), most);
#else
    // From 2²³ to 2²⁴ a float32 is a whole number, with 1 in its last bit: what is put there is rounded half to even.
    const float whole = 12582912.0f;
    float raised = __fmaf_rn(y, factor, whole);
    if (SHIFT) raised += kept.zero[SHIFT ? i : 0];
    return TOKEN ? raised : fminf(fmaxf(raised, whole - most - SHIFT), whole + most);
#endif
}

extern "C" __global__ void __launch_bounds__(PADDED, BLOCKS) norm_order(const __grid_constant__ Work work) {
    __shared__ __align__(16) unsigned char rows[2][WIDTH * 2 + 16]; // behind a row stands a zero
    __shared__ float sums[2][WARPS], tops[2][WARPS];
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool reads = t < READERS, writes = t < WRITERS;
    const uint4 nothing = {0, 0, 0, 0};
    // pieces of 8 columns, t and READERS + t: neighbours read side by side
    const uint4 scale0 = reads ? work.weight[t] : nothing, scale1 = reads ? work.weight[READERS + t] : nothing;
    Columns kept;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        u32 both = 0;
        for (int j = 0; j < 2; ++j) {
            const int column = 16 * t + 2 * i + j, from = writes ? work.order[column] : -1;
            both |= static_cast<u32>(2 * (from < 0 ? WIDTH : from)) << (16 * j);
            if (EACH) kept.factor[EACH ? 2 * i + j : 0] = from < 0 ? 0.0f : work.factor[column];
            if (SHIFT) kept.zero[SHIFT ? 2 * i + j : 0] = from < 0 ? 0.0f : static_cast<float>(work.zero[column]);
        }
        kept.place[i] = both;
    }
    if (t < 2) *reinterpret_cast<u32 *>(rows[t] + WIDTH * 2) = 0;
    after_those_in_front();
    const float fixed = TOKEN || EACH ? 1.0f : work.factor[0];
    uint4 x0 = nothing, x1 = nothing, r0 = nothing, r1 = nothing;
    auto fetch = [&](long long row) {
        if (row >= work.rows || !reads) return;
        x0 = work.x[row * work.x_stride + t], x1 = work.x[row * work.x_stride + READERS + t];
        if (ADD) r0 = work.total[row * work.total_stride + t], r1 = work.total[row * work.total_stride + READERS + t];
    };
    fetch(blockIdx.x);
    int turn = 0;
    for (long long row = blockIdx.x; row < work.rows; row += gridDim.x, turn ^= 1) {
        u32 v[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
        if (ADD) {
            const u32 r[8] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = rounded_pair(low(v[i]) + low(r[i]), upper(v[i]) + upper(r[i]));
            if (reads) {
                work.total[row * work.total_stride + t] = make_uint4(v[0], v[1], v[2], v[3]);
                work.total[row * work.total_stride + READERS + t] = make_uint4(v[4], v[5], v[6], v[7]);
            }
        }
        fetch(row + gridDim.x);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += low(v[i]) * low(v[i]) + upper(v[i]) * upper(v[i]);
        sum = warp_sum(sum);
        if (lane == 0) sums[turn][warp] = sum;
        __syncthreads();
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += sums[turn][i];
        const float spread = rsqrtf(sum / WIDTH + work.eps);
        const u32 w[8] = {scale0.x, scale0.y, scale0.z, scale0.w, scale1.x, scale1.y, scale1.z, scale1.w};
        u32 tops_here = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = times(rounded_pair(low(v[i]) * spread, upper(v[i]) * spread), w[i]);
            if (TOKEN) tops_here = larger_sizes(tops_here, v[i]);
        }
        float top = fmaxf(low(tops_here), upper(tops_here));
        if (reads) {
            reinterpret_cast<uint4 *>(rows[turn])[t] = make_uint4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<uint4 *>(rows[turn])[READERS + t] = make_uint4(v[4], v[5], v[6], v[7]);
        }
        if (TOKEN) {
            top = warp_most(top);
            if (lane == 0) tops[turn][warp] = top;
        }
        __syncthreads();
        float by = fixed;
        if (TOKEN) {
            top = 1e-6f;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) top = fmaxf(top, tops[turn][i]);
            by = __fdiv_rn(work.most, top);
            if (t == 0) work.scale[row] = __fdiv_rn(top, work.most);
        }
        u32 out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float a = column(kept, rows[turn], 4 * i, by, work.most);
            const float b = column(kept, rows[turn], 4 * i + 1, by, work.most);
            const float c = column(kept, rows[turn], 4 * i + 2, by, work.most);
            const float d = column(kept, rows[turn], 4 * i + 3, by, work.most);
#ifdef FP8
            out[i] = fp8_pair(a, b) | fp8_pair(c, d) << 16;
#else
            out[i] = bytes(a, b, c, d);
#endif
        }
        if (writes) work.values[row * WRITERS + t] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}
