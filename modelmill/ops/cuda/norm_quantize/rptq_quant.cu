// RPTQ activation quantization for many rows.
//
// Computes: q[M, columns] = clamp(round(y[:, perm] / step)) with y = x[M, width], or with GATED
//     silu(gate) · up of x[M, 2 · width]; with DYNAMIC steps[M, groups] = amax / qmax; with
//     FALLBACK static steps, longer where a row leaves the range in a group
// Dtypes: x bfloat16 or float16; q int8; float32 steps and factors
// Layout: row-major; perm, factors and zero-points [columns]
// Range: M ≥ 128; width and columns multiples of 4; dynamic groups of 32, 64 or a multiple of 128
//     columns
// Technique: permutation through shared memory (four rows side by side), warp shuffles for the
//     group amax, PDL
// Ops: rptq_quant (launched by rptq_quant.py)
//
// A gathered read of a permuted row would fetch a 32-byte sector per 2-byte value. So a block reads
// four rows contiguously, applies the gate, and stores the four values of a column side by side (8
// bytes) in shared memory: one load per permuted column.
//
// Macros: GATED, DYNAMIC (a step per token and group, else `factor` per column), FALLBACK (DYNAMIC
// from `factor`, `zero` and `group_step`), ZERO_POINTS, LANES (threads that reduce a group's amax:
// 8 to 32, 4 columns each), HALF.
#include "common/half_types.cuh"

constexpr int TOKENS = 4, THREADS = 512, WARPS = THREADS / 32;
constexpr float MIN_AMAX = 1e-6f;

struct Work {
    const u16* x;
    const int* perm;  // [columns], source column; -1: padding
    const float* factor;
    const int* zero;
    unsigned char* q;  // [rows, columns]
    float* step;       // [rows, groups]
    const float* group_step;
    long long stride;
    int rows, width, columns, group;
    float qmax;
};
static_assert(sizeof(Work) == 88, "rptq_quant.py packs 88 bytes");

extern __shared__ __align__(16) unsigned char shared[];  // [width][TOKENS] of 16 bits

// SwiGLU of two columns of a token, rounded where the two separate ops would round.
__device__ inline u32 silu_mul_pair(u32 gate, u32 up) {
    const float a = low(gate), b = high(gate);
    const u32 open = rounded_pair(a / (1.0f + __expf(-a)), b / (1.0f + __expf(-b)));
    return rounded_pair(low(open) * low(up), high(open) * high(up));
}

// Stages four columns of the block's tokens in shared memory, in the order of x.
__device__ inline void stage_columns(const Work& w, int first, int column) {
    uint2 loaded[TOKENS], up[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const u16* row = w.x + min(first + t, w.rows - 1) * w.stride + column;
        loaded[t] = *reinterpret_cast<const uint2*>(row);
        if (GATED) up[t] = *reinterpret_cast<const uint2*>(row + w.width);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (GATED)
            loaded[t] = {silu_mul_pair(loaded[t].x, up[t].x), silu_mul_pair(loaded[t].y, up[t].y)};
    }
    uint4* to = reinterpret_cast<uint4*>(shared + column * 2 * TOKENS);
    to[0] = {__byte_perm(loaded[0].x, loaded[1].x, 0x5410),
             __byte_perm(loaded[2].x, loaded[3].x, 0x5410),
             __byte_perm(loaded[0].x, loaded[1].x, 0x7632),
             __byte_perm(loaded[2].x, loaded[3].x, 0x7632)};
    to[1] = {__byte_perm(loaded[0].y, loaded[1].y, 0x5410),
             __byte_perm(loaded[2].y, loaded[3].y, 0x5410),
             __byte_perm(loaded[0].y, loaded[1].y, 0x7632),
             __byte_perm(loaded[2].y, loaded[3].y, 0x7632)};
}

// The tokens' values of four permuted columns from `at` on; 0 for padding columns.
struct Values {
    float of[4][TOKENS];  // by column
    bool valid[4];

    __device__ Values(const Work& w, int at) {
        const int4 perm = *reinterpret_cast<const int4*>(w.perm + at);
        const int from[4] = {perm.x, perm.y, perm.z, perm.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            valid[i] = from[i] >= 0;
            uint2 four = {0, 0};
            if (valid[i]) four = *reinterpret_cast<const uint2*>(shared + from[i] * 2 * TOKENS);
            of[i][0] = low(four.x), of[i][1] = high(four.x), of[i][2] = low(four.y),
            of[i][3] = high(four.y);
        }
        if (FALLBACK) scale_and_shift(w, at);
    }

    // The static integers before they are clamped.
    __device__ void scale_and_shift(const Work& w, int at) {
        const float4 by = *reinterpret_cast<const float4*>(w.factor + at);
        const int4 shift = *reinterpret_cast<const int4*>(w.zero + at);
        const float factor[4] = {by.x, by.y, by.z, by.w};
        const int zero[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
                of[i][t] =
                    valid[i] ? rintf(of[i][t] * factor[i]) + static_cast<float>(zero[i]) : 0.0f;
    }
};

__device__ inline int round_to_int(float scaled) {
    return __float2int_rn(fminf(fmaxf(scaled, -65536.0f), 65536.0f));
}

__device__ inline void store(const Work& w, int first, int at, int t, const int (&values)[4]) {
    if (first + t >= w.rows) return;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (static_cast<u32>(values[i]) & 0xFF) << 8 * i;
    *reinterpret_cast<u32*>(w.q + static_cast<long long>(first + t) * w.columns + at) = word;
}

// Static quantization: factor (and zero-point) per column.
__device__ inline void quantize(const Work& w, int first, int at) {
    const Values values(w, at);
    const float4 by = *reinterpret_cast<const float4*>(w.factor + at);
    const float factor[4] = {by.x, by.y, by.z, by.w};
    int4 shift = {0, 0, 0, 0};
    if (ZERO_POINTS) shift = *reinterpret_cast<const int4*>(w.zero + at);
    const int zero[4] = {shift.x, shift.y, shift.z, shift.w}, most = static_cast<int>(w.qmax);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q[i] =
                min(max(round_to_int(values.of[i][t] * factor[i]) + zero[i], -most - ZERO_POINTS),
                    most);
            if (!values.valid[i]) q[i] = 0;
        }
        store(w, first, at, t, q);
    }
}

// amax of a group: LANES threads with 4 columns each, called repeatedly for larger groups.
__device__ inline void reduce_amax(float (&amax)[TOKENS], const Values& values) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(values.of[i][t]));
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
        amax[t] = fmaxf(amax[t], most);
    }
}

__device__ inline void store_quantized(const Work& w, int first, int at, const Values& values,
                                       const float (&amax)[TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float up = __fdiv_rn(w.qmax, amax[t]);
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            q[i] = __float2int_rn(fminf(fmaxf(values.of[i][t] * up, -w.qmax), w.qmax));
        store(w, first, at, t, q);
    }
}

// Dynamic quantization of a warp's columns: 128, or one group that is a multiple of 128.
__device__ inline void quantize_dynamic(const Work& w, int first, int begin, int lane) {
    const int span = LANES < 32 ? 128 : w.group;
    const float least = FALLBACK ? w.qmax : MIN_AMAX;
    float amax[TOKENS] = {least, least, least, least};
    for (int at = begin; at < begin + span; at += 128) {
        // the last warp of small groups may have lanes without columns
        const int mine = min(at + 4 * lane, w.columns - 4);
        const Values values(w, mine);
        reduce_amax(amax, values);
        if (span == 128 && at + 4 * lane < w.columns) store_quantized(w, first, mine, values, amax);
    }
    if (span > 128) {
        for (int at = begin + 4 * lane; at < begin + span; at += 128) {
            const Values values(w, at);
            store_quantized(w, first, at, values, amax);
        }
    }
    const int group = (begin + 4 * lane) / w.group;
    if (lane % LANES != 0 || group * w.group >= w.columns) return;
    const float step = FALLBACK ? w.group_step[group] : 1.0f;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const long long row = first + t;
        if (row < w.rows)
            w.step[row * (w.columns / w.group) + group] = __fdiv_rn(amax[t], w.qmax) * step;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    rptq_quant(const __grid_constant__ Work w) {
    const int first = blockIdx.x * TOKENS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_wait();
    pdl_launch_dependents();
    for (int column = threadIdx.x * 4; column < w.width; column += THREADS * 4)
        stage_columns(w, first, column);
    __syncthreads();
    if (!DYNAMIC) {
        for (int at = threadIdx.x * 4; at < w.columns; at += THREADS * 4) quantize(w, first, at);
        return;
    }
    const int span = LANES < 32 ? 128 : w.group;
    for (int begin = warp * span; begin < w.columns; begin += WARPS * span)
        quantize_dynamic(w, first, begin, lane);
}
