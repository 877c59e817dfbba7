// Fused (residual add +) RMSNorm + 8-bit quantization + column permutation for few rows, one block
//     per row, bound by latency.
//
// Computes: values[M, COLUMNS] = quantize(rmsnorm(x[M, WIDTH] (+ residual)))[:, perm], with a
//     dynamic scale per token, one static factor, or a factor and zero-point per column
// Dtypes: x bfloat16 or float16; values int8 or e4m3; float32 scales
// Layout: row-major
// Range: M ≤ 255; WIDTH and COLUMNS multiples of 16 up to 8,192; perm required
// Technique: PDL (weights, perm and factors are loaded before griddepcontrol.wait), permutation
//     through shared memory
// Ops: rms_norm_quant, add_rms_norm_quant (launched by rmsnorm_quant_permute.py)
//
// Weights, perm and factors are loaded before griddepcontrol.wait (PDL); the row is permuted
// through shared memory.
//
// Macros: WIDTH (of x; a multiple of 16), COLUMNS (of the values; a multiple of 16), ADD_RESIDUAL,
// PER_TOKEN (dynamic scale per token), PER_COLUMN (a factor per column), ZERO_POINTS, SINGLE_ROW
// (one row: PDL trigger at the start), FP8, HALF (float16 instead of bfloat16).
#include "norm_quantize/quantize_8bit.cuh"
#include "common/hopper.cuh"

constexpr int READ_THREADS = WIDTH / 8, WRITE_THREADS = COLUMNS / 8;
constexpr int THREADS = READ_THREADS > WRITE_THREADS ? READ_THREADS : WRITE_THREADS,
              BLOCK_THREADS = (THREADS + 31) / 32 * 32, WARPS = BLOCK_THREADS / 32;

struct Work {
    const uint4 *x, *weight;
    uint4* residual;  // ADD_RESIDUAL: overwritten with the sum
    uint2* values;
    float* scale;             // TOKEN
    const float* factor;      // [1], or [COLUMNS] with PER_COLUMN
    const int4 *zero, *perm;  // [COLUMNS]
    float eps, qmax;
};
static_assert(sizeof(Work) == 72, "rmsnorm_quant_permute.py packs 72 bytes");

// A thread's 8 output columns: source column, factor, zero-point.
struct Columns {
    int from[8];  // padding columns: index of the zero after the row
    float factor[8], zero[8];

    __device__ void read(const Work& work, int t, bool writes) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int4 perm = writes ? work.perm[2 * t + half] : make_int4(-1, -1, -1, -1);
            const int4 shift =
                ZERO_POINTS && writes ? work.zero[2 * t + half] : make_int4(0, 0, 0, 0);
            float4 by = {0.0f, 0.0f, 0.0f, 0.0f};
            if (PER_COLUMN && writes)
                by = reinterpret_cast<const float4*>(work.factor)[2 * t + half];
            const int places[4] = {perm.x, perm.y, perm.z, perm.w},
                      shifts[4] = {shift.x, shift.y, shift.z, shift.w};
            const float factors[4] = {by.x, by.y, by.z, by.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool valid = places[i] >= 0;
                from[4 * half + i] = valid ? places[i] : WIDTH;
                factor[4 * half + i] = valid ? factors[i] : 0.0f;
                zero[4 * half + i] = valid ? static_cast<float>(shifts[i]) : 0.0f;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    rmsnorm_quant_permute_small_m(const __grid_constant__ Work work) {
    __shared__ __align__(16) u16 row[WIDTH + 8];  // a zero after the columns
    __shared__ __align__(16) float sums[32];
    __shared__ __align__(16) u32 amaxes[32];
    if (SINGLE_ROW) pdl_launch_dependents();
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool reads = t < READ_THREADS, writes = t < WRITE_THREADS;
    const uint4 zeros = {0, 0, 0, 0};
    const uint4 weight = reads ? work.weight[t] : zeros;
    Columns columns;
    columns.read(work, t, writes);
    if (t == 0) row[WIDTH] = 0;
    if (t < 32) sums[t] = 0.0f, amaxes[t] = 0;  // fewer than 32 warps store below
    const float fixed = PER_TOKEN || PER_COLUMN ? 1.0f : work.factor[0];
    __syncthreads();
    pdl_wait();
    if (!SINGLE_ROW) pdl_launch_dependents();
    const long long at = static_cast<long long>(blockIdx.x) * READ_THREADS + t;
    const uint4 x = reads ? work.x[at] : zeros,
                other = ADD_RESIDUAL && reads ? work.residual[at] : zeros;
    const u32 w[4] = {weight.x, weight.y, weight.z, weight.w},
              o[4] = {other.x, other.y, other.z, other.w};
    u32 v[4] = {x.x, x.y, x.z, x.w};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (ADD_RESIDUAL) v[i] = rounded_pair(low(v[i]) + low(o[i]), high(v[i]) + high(o[i]));
        sum += low(v[i]) * low(v[i]) + high(v[i]) * high(v[i]);
    }
    if (ADD_RESIDUAL && reads) work.residual[at] = make_uint4(v[0], v[1], v[2], v[3]);
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < (WARPS + 3) / 4; ++i) {
        const float4 four = reinterpret_cast<const float4*>(sums)[i];
        sum += (four.x + four.y) + (four.z + four.w);
    }
    const float inv_rms = rsqrtf(sum / WIDTH + work.eps);
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        v[i] = mul_pairs(rounded_pair(low(v[i]) * inv_rms, high(v[i]) * inv_rms), w[i]);
        amax = max_abs_pairs(amax, v[i]);
    }
    if (reads) reinterpret_cast<uint4*>(row)[t] = make_uint4(v[0], v[1], v[2], v[3]);
    if (PER_TOKEN) {
        amax = __reduce_max_sync(~0u, max(amax & 0xFFFF, amax >> 16));
        if (lane == 0) amaxes[warp] = amax;
    }
    __syncthreads();
    float by = fixed;
    if (PER_TOKEN) {
        amax = 0;
#pragma unroll
        for (int i = 0; i < (WARPS + 3) / 4; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(amaxes)[i];
            amax = max(amax, max(max(four.x, four.y), max(four.z, four.w)));
        }
        const float size = fmaxf(low(amax), 1e-6f);
        by = __fdiv_rn(work.qmax, size);
        if (t == 0) work.scale[blockIdx.x] = __fdiv_rn(size, work.qmax);
    }
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        y[i] = scale_to_8bit(to_float(row[columns.from[i]]), PER_COLUMN ? columns.factor[i] : by,
                             columns.zero[i], work.qmax);
    const uint2 out = {pack_bytes(y[0], y[1], y[2], y[3]), pack_bytes(y[4], y[5], y[6], y[7])};
    if (writes) work.values[static_cast<long long>(blockIdx.x) * WRITE_THREADS + t] = out;
}
