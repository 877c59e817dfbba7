// Rows to clustered integers (ops/rptq_quant.py), four tokens at a time: columns in another order through shared memory,
// behind SwiGLU's gate or without.
//
// A row read in another order brings 32 bytes from the cache for each 2 that count. So a block reads its tokens as they lie,
// gates, and keeps the four values of a column side by side, 8 bytes: whoever wants a column in another place has all four
// in one load.
//
// Macros: GATED (x is twice as wide), OWN (each token and group finds its step; else `factor` is given for each column),
// SHIFT (zero-points), LANES (threads that find a group's largest value: a quarter of a warp to all of it, 4 columns each), HALF.
#include "half_types.cuh"

constexpr int TOKENS = 4, THREADS = 512, WARPS = THREADS / 32;
constexpr float LEAST = 1e-6f;

struct Work {
    const u16 *x;
    const int *order; // [columns], -1: none
    const float *factor;
    const int *zero;
    unsigned char *q; // [rows, columns]
    float *step;      // [rows, groups]
    long long stride;
    int rows, width, columns, group;
    float most;
};
static_assert(sizeof(Work) == 80, "rptq_quant.py packs 80 bytes");

extern __shared__ __align__(16) unsigned char shared[]; // [width][TOKENS] of 16 bits

// Two columns of a token, behind the gate; rounded where two ops would round.
__device__ inline u32 gated_pair(u32 gate, u32 up) {
    const float a = low(gate), b = high(gate);
    const u32 open = rounded_pair(a / (1.0f + __expf(-a)), b / (1.0f + __expf(-b)));
    return rounded_pair(low(open) * low(up), high(open) * high(up));
}

// Four columns of the block's tokens, as they lie.
__device__ inline void bring(const Work &w, int first, int column) {
    uint2 got[TOKENS], up[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const u16 *row = w.x + min(first + t, w.rows - 1) * w.stride + column;
        got[t] = *reinterpret_cast<const uint2 *>(row);
        if (GATED) up[t] = *reinterpret_cast<const uint2 *>(row + w.width);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        if (GATED) got[t] = {gated_pair(got[t].x, up[t].x), gated_pair(got[t].y, up[t].y)};
    }
    uint4 *to = reinterpret_cast<uint4 *>(shared + column * 2 * TOKENS);
    to[0] = {__byte_perm(got[0].x, got[1].x, 0x5410), __byte_perm(got[2].x, got[3].x, 0x5410),
             __byte_perm(got[0].x, got[1].x, 0x7632), __byte_perm(got[2].x, got[3].x, 0x7632)};
    to[1] = {__byte_perm(got[0].y, got[1].y, 0x5410), __byte_perm(got[2].y, got[3].y, 0x5410),
             __byte_perm(got[0].y, got[1].y, 0x7632), __byte_perm(got[2].y, got[3].y, 0x7632)};
}

// Of four columns from `at` on in their order the tokens' values; 0 where there is none.
struct Values {
    float of[4][TOKENS]; // by column
    bool real[4];

    __device__ Values(const Work &w, int at) {
        const int4 order = *reinterpret_cast<const int4 *>(w.order + at);
        const int from[4] = {order.x, order.y, order.z, order.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            real[i] = from[i] >= 0;
            uint2 four = {0, 0};
            if (real[i]) four = *reinterpret_cast<const uint2 *>(shared + from[i] * 2 * TOKENS);
            of[i][0] = low(four.x), of[i][1] = high(four.x), of[i][2] = low(four.y), of[i][3] = high(four.y);
        }
    }
};

__device__ inline int whole(float scaled) { return __float2int_rn(fminf(fmaxf(scaled, -65536.0f), 65536.0f)); }

__device__ inline void store(const Work &w, int first, int at, int t, const int (&values)[4]) {
    if (first + t >= w.rows) return;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= (static_cast<u32>(values[i]) & 0xFF) << 8 * i;
    *reinterpret_cast<u32 *>(w.q + static_cast<long long>(first + t) * w.columns + at) = word;
}

// With factors that are known.
__device__ inline void quantize(const Work &w, int first, int at) {
    const Values values(w, at);
    const float4 by = *reinterpret_cast<const float4 *>(w.factor + at);
    const float factor[4] = {by.x, by.y, by.z, by.w};
    int4 shift = {0, 0, 0, 0};
    if (SHIFT) shift = *reinterpret_cast<const int4 *>(w.zero + at);
    const int zero[4] = {shift.x, shift.y, shift.z, shift.w}, most = static_cast<int>(w.most);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q[i] = min(max(whole(values.of[i][t] * factor[i]) + zero[i], -most - SHIFT), most);
            if (!values.real[i]) q[i] = 0;
        }
        store(w, first, at, t, q);
    }
}

// The largest sizes of a group's values, this warp's LANES threads having 4 columns each, or more of them in turn.
__device__ inline void largest(float (&amax)[TOKENS], const Values &values) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(values.of[i][t]));
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
        amax[t] = fmaxf(amax[t], most);
    }
}

__device__ inline void quantize_by(const Work &w, int first, int at, const Values &values, const float (&amax)[TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float up = __fdiv_rn(w.most, amax[t]);
        int q[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = __float2int_rn(fminf(fmaxf(values.of[i][t] * up, -w.most), w.most));
        store(w, first, at, t, q);
    }
}

// A warp's part of the columns: 128, or a group of several times 128.
__device__ inline void quantize_own(const Work &w, int first, int begin, int lane) {
    const int span = LANES < 32 ? 128 : w.group;
    float amax[TOKENS] = {LEAST, LEAST, LEAST, LEAST};
    for (int at = begin; at < begin + span; at += 128) {
        // the last warp of small groups may have none left for some of its lanes
        const int mine = min(at + 4 * lane, w.columns - 4);
        const Values values(w, mine);
        largest(amax, values);
        if (span == 128 && at + 4 * lane < w.columns) quantize_by(w, first, mine, values, amax);
    }
    if (span > 128) {
        for (int at = begin + 4 * lane; at < begin + span; at += 128) {
            const Values values(w, at);
            quantize_by(w, first, at, values, amax);
        }
    }
    const int group = (begin + 4 * lane) / w.group;
    if (lane % LANES != 0 || group * w.group >= w.columns) return;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const long long row = first + t;
        if (row < w.rows) w.step[row * (w.columns / w.group) + group] = __fdiv_rn(amax[t], w.most);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) rptq_quant(const __grid_constant__ Work w) {
    const int first = blockIdx.x * TOKENS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_wait();
    pdl_launch_dependents();
    for (int column = threadIdx.x * 4; column < w.width; column += THREADS * 4) bring(w, first, column);
    __syncthreads();
    if (!OWN) {
        for (int at = threadIdx.x * 4; at < w.columns; at += THREADS * 4) quantize(w, first, at);
        return;
    }
    const int span = LANES < 32 ? 128 : w.group;
    for (int begin = warp * span; begin < w.columns; begin += WARPS * span) quantize_own(w, first, begin, lane);
}
