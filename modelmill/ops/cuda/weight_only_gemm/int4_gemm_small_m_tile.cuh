// One K tile of a consumer warpgroup of the kernel int4_gemm_small_m.
//
// Computes: acc[64, BLOCK_M] += dequant(weight[64, 128]) · x[BLOCK_M, 128]ᵀ (16 weight rows per
//     warp)
// Dtypes: packed int4 codes to bfloat16 or float16; float32 accumulators
// Layout: weights in registers as wgmma A fragments, x in shared memory (128-byte swizzle)
// Range: 128 columns, BLOCK_M 32 or 64
// Technique: register prefetch, wgmma with A in registers
// Used by: int4_gemm_small_m.cu
#pragma once

// 4 x 4 transpose in a quad: word k of thread p becomes word p of thread k.
__device__ inline void transpose_quad(u32 (&v)[4], int quad_lane) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = quad_lane & bit;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int low = bit == 1 ? 2 * pair : pair, high = low + bit;
            const u32 received = __shfl_xor_sync(~0u, upper ? v[low] : v[high], bit);
            v[low] = upper ? received : v[low];
            v[high] = upper ? v[high] : received;
        }
    }
}

// Byte order for the quad: thread p's word has columns 2 p, 2 p + 8, 2 p + 1, 2 p + 9 of the run.
__device__ inline void to_operand_order(u32 (&v)[4], const uint4& run) {
    v[0] = __byte_perm(run.x, run.z, 0x5140);
    v[1] = __byte_perm(run.x, run.z, 0x7362);
    v[2] = __byte_perm(run.y, run.w, 0x5140);
    v[3] = __byte_perm(run.y, run.w, 0x7362);
}

struct KTile {
    uint4 low, high;
};

struct WeightPointers {
    const uint4 *low, *high;
    int num_tiles;  // K tiles in which this thread has a run
};

__device__ inline void fetch(KTile& tile, const WeightPointers& at, int k_tile) {
    const uint4 zero = {0, 0, 0, 0};
    tile.low = k_tile < at.num_tiles ? load_once(at.low + 4 * k_tile) : zero;
    tile.high = k_tile < at.num_tiles ? load_once(at.high + 4 * k_tile) : zero;
}

// part = 64 weight rows times x for one K tile.
__device__ inline void tile_mma(float (&part)[BLOCK_M / 2], const KTile& tile, u64 x, u32 full,
                                u32 parity, int quad_lane) {
    u32 low[4], high[4];
    to_operand_order(low, tile.low);
    to_operand_order(high, tile.high);
    transpose_quad(low, quad_lane);
    transpose_quad(high, quad_lane);
    u32 a[8][4];
#pragma unroll
    for (int run = 0; run < 4; ++run) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32(&to)[4] = a[2 * run + half];
            to[0] = biased_int4_pair(low[run], 4 * half),
            to[1] = biased_int4_pair(high[run], 4 * half);
            to[2] = biased_int4_pair(low[run], 4 * half + 8),
            to[3] = biased_int4_pair(high[run], 4 * half + 8);
        }
    }
    mbarrier_wait(full, parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // descriptor addresses count 16 bytes
        const u64 right = x + (i / 4 * SLAB_BYTES + i % 4 * 32) / 16;
        wgmma(part, a[i][0], a[i][1], a[i][2], a[i][3], right, i > 0);
    }
    wgmma_finish(part, a);
}

__device__ inline void flush(float (&total)[BLOCK_M / 2], const float (&part)[BLOCK_M / 2],
                             float2 low, float2 high, const float2* sums) {
    const float base_low = (OFFSET ? low.y : -INT4_ZERO_POINT * low.x) - MAGIC * low.x;
    const float base_high = (OFFSET ? high.y : -INT4_ZERO_POINT * high.x) - MAGIC * high.x;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 8; ++i) {
        const float2 sum = sums[4 * i];
        total[4 * i] = fmaf(low.x, part[4 * i], fmaf(base_low, sum.x, total[4 * i]));
        total[4 * i + 1] = fmaf(low.x, part[4 * i + 1], fmaf(base_low, sum.y, total[4 * i + 1]));
        total[4 * i + 2] = fmaf(high.x, part[4 * i + 2], fmaf(base_high, sum.x, total[4 * i + 2]));
        total[4 * i + 3] = fmaf(high.x, part[4 * i + 3], fmaf(base_high, sum.y, total[4 * i + 3]));
    }
}
