// Weighted sum over the experts of each token.
//
// Computes: out[M, H] = sum of topk_weights · pairs[M, top_k, H] (+ shared[M, H])
// Dtypes: pairs, shared and out bfloat16 or float16; topk_weights and sums float32
// Layout: row-major; pairs of experts of another rank (id −1) are not read
// Range: 4 ≤ M ≤ 512 (mxfp4_fused_moe: 2 ≤ M ≤ 512), any top_k; H a multiple of 8
// Technique: 16 bytes a thread, PDL
// Ops: int4_fused_moe, int8_fused_moe, mxfp4_fused_moe (launched by grouped_gemm_wq.py)
//
// Macro: HALF.
#include "common/half_types.cuh"

constexpr int THREADS = 128, EACH = 8;  // columns of a thread

struct Work {
    const u16* pairs;
    const int* ids;
    const float* weights;
    const u16* shared;  // or null
    u16* out;
    int tokens, top_k, columns;
};
static_assert(sizeof(Work) == 56, "grouped_gemm_wq.py packs 56 bytes");

__device__ inline void add_scaled(float (&sum)[EACH], const uint4& eight, float by) {
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = fmaf(low(words[i]), by, sum[2 * i]);
        sum[2 * i + 1] = fmaf(high(words[i]), by, sum[2 * i + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) moe_combine(const __grid_constant__ Work w) {
    pdl_wait();
    pdl_launch_dependents();
    const int parts = w.columns / EACH, at = blockIdx.x * THREADS + threadIdx.x;
    const int token = at / parts, column = at % parts * EACH;
    if (token >= w.tokens) return;
    float sum[EACH] = {};
#pragma unroll 4
    for (int slot = 0; slot < w.top_k; ++slot) {
        const long long pair = static_cast<long long>(token) * w.top_k + slot;
        if (w.ids[pair] < 0) continue;
        const uint4 eight = *reinterpret_cast<const uint4*>(w.pairs + pair * w.columns + column);
        add_scaled(sum, eight, w.weights[pair]);
    }
    const long long out = static_cast<long long>(token) * w.columns + column;
    if (w.shared) add_scaled(sum, *reinterpret_cast<const uint4*>(w.shared + out), 1.0f);
    *reinterpret_cast<uint4*>(w.out +
                              out) = {rounded_pair(sum[0], sum[1]), rounded_pair(sum[2], sum[3]),
                                      rounded_pair(sum[4], sum[5]), rounded_pair(sum[6], sum[7])};
}
