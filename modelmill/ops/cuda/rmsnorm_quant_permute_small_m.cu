// RMSNorm of a few rows, of x or of x + residual, rounded to 8 bits with its columns in another order: a block a row, all
// that is kept of a column on its way before the kernel in front has ended. What counts is how long one row takes.
//
// Macros: WIDTH (of x; a multiple of 16), COLUMNS (of the values; a multiple of 16), ADD, TOKEN (a scale a token), EACH (a
// factor a column), SHIFT (zero-points), ALONE (one row: the next kernel may be placed at once), FP8, HALF (float16 for
// bfloat16).
#include "quantize_8bit.cuh"
#include "hopper.cuh"

constexpr int READERS = WIDTH / 8, WRITERS = COLUMNS / 8;
constexpr int THREADS = READERS > WRITERS ? READERS : WRITERS, PADDED = (THREADS + 31) / 32 * 32, WARPS = PADDED / 32;

struct Work {
    const uint4 *x, *weight;
    uint4 *total; // ADD: the residual, written over with the sum
    uint2 *values;
    float *scale;             // TOKEN
    const float *factor;      // [1], or with EACH [COLUMNS]
    const int4 *zero, *order; // [COLUMNS]
    float eps, most;
};
static_assert(sizeof(Work) == 72, "rmsnorm_quant_permute.py packs 72 bytes");

// What a thread keeps of its 8 columns of the values.
struct Columns {
    int from[8]; // of a column that is none, that of the zero behind the row
    float factor[8], zero[8];

    __device__ void read(const Work &work, int t, bool writes) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int4 order = writes ? work.order[2 * t + half] : make_int4(-1, -1, -1, -1);
            const int4 shift = SHIFT && writes ? work.zero[2 * t + half] : make_int4(0, 0, 0, 0);
            float4 by = {0.0f, 0.0f, 0.0f, 0.0f};
            if (EACH && writes) by = reinterpret_cast<const float4 *>(work.factor)[2 * t + half];
            const int places[4] = {order.x, order.y, order.z, order.w}, shifts[4] = {shift.x, shift.y, shift.z, shift.w};
            const float factors[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool there = places[i] >= 0;
                from[4 * half + i] = there ? places[i] : WIDTH;
                factor[4 * half + i] = there ? factors[i] : 0.0f;
                zero[4 * half + i] = there ? static_cast<float>(shifts[i]) : 0.0f;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(PADDED, 1) rmsnorm_quant_permute_small_m(const __grid_constant__ Work work) {
    __shared__ __align__(16) u16 row[WIDTH + 8]; // behind the columns a zero
    __shared__ __align__(16) float sums[32];
    __shared__ __align__(16) u32 tops[32];
    if (ALONE) pdl_launch_dependents();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool reads = t < READERS, writes = t < WRITERS;
    const uint4 nothing = {0, 0, 0, 0};
    const uint4 weight = reads ? work.weight[t] : nothing;
    Columns kept;
    kept.read(work, t, writes);
    if (t == 0) row[WIDTH] = 0;
    if (t < 32) sums[t] = 0.0f, tops[t] = 0; // beside what fewer warps than 32 will store
    const float fixed = TOKEN || EACH ? 1.0f : work.factor[0];
    __syncthreads();
    pdl_wait();
    if (!ALONE) pdl_launch_dependents();
    const long long at = static_cast<long long>(blockIdx.x) * READERS + t;
    const uint4 x = reads ? work.x[at] : nothing, other = ADD && reads ? work.total[at] : nothing;
    const u32 w[4] = {weight.x, weight.y, weight.z, weight.w}, o[4] = {other.x, other.y, other.z, other.w};
    u32 v[4] = {x.x, x.y, x.z, x.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (ADD) v[i] = rounded_pair(low(v[i]) + low(o[i]), high(v[i]) + high(o[i]));
        sum += low(v[i]) * low(v[i]) + high(v[i]) * high(v[i]);
    }
    if (ADD && reads) work.total[at] = make_uint4(v[0], v[1], v[2], v[3]);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (WARPS + 3) / 4; ++i) {
        const float4 four = reinterpret_cast<const float4 *>(sums)[i];
        sum += (four.x + four.y) + (four.z + four.w);
    }
    const float spread = rsqrtf(sum / WIDTH + work.eps);
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = times(rounded_pair(low(v[i]) * spread, high(v[i]) * spread), w[i]);
        top = larger_sizes(top, v[i]);
    }
    if (reads) reinterpret_cast<uint4 *>(row)[t] = make_uint4(v[0], v[1], v[2], v[3]);
    if (TOKEN) {
        top = __reduce_max_sync(~0u, max(top & 0xFFFF, top >> 16));
        if (lane == 0) tops[warp] = top;
    }
    __syncthreads();
    float by = fixed;
    if (TOKEN) {
        top = 0;
#pragma unroll
        for (int i = 0; i < (WARPS + 3) / 4; ++i) {
            const uint4 four = reinterpret_cast<const uint4 *>(tops)[i];
            top = max(top, max(max(four.x, four.y), max(four.z, four.w)));
        }
        const float size = fmaxf(low(top), 1e-6f);
        by = __fdiv_rn(work.most, size);
        if (t == 0) work.scale[blockIdx.x] = __fdiv_rn(size, work.most);
    }
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        y[i] = scaled(value(row[kept.from[i]]), EACH ? kept.factor[i] : by, kept.zero[i], work.most);
    const uint2 out = {bytes(y[0], y[1], y[2], y[3]), bytes(y[4], y[5], y[6], y[7])};
    if (writes) work.values[static_cast<long long>(blockIdx.x) * WRITERS + t] = out;
}
