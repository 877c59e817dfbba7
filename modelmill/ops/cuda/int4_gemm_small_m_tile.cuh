// A warp's piece of weights in int4_gemm_small_m.cu, 128 columns of 16 rows: from memory, as an operand of wgmma, times x.
#pragma once

// Of four threads that hold four words each: word k of thread p becomes word p of thread k.
__device__ inline void transpose_quad(u32 (&v)[4], int place) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = place & bit;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const int low = bit == 1 ? 2 * pair : pair, high = low + bit;
            const u32 got = __shfl_xor_sync(~0u, upper ? v[low] : v[high], bit);
            v[low] = upper ? got : v[low];
            v[high] = upper ? v[high] : got;
        }
    }
}

// A run's words, ordered for four threads: thread p's has the bytes of columns 2 p, 2 p + 8, 2 p + 1, 2 p + 9.
__device__ inline void to_operand_order(u32 (&v)[4], const uint4 &run) {
    v[0] = __byte_perm(run.x, run.z, 0x5140);
    v[1] = __byte_perm(run.x, run.z, 0x7362);
    v[2] = __byte_perm(run.y, run.w, 0x5140);
    v[3] = __byte_perm(run.y, run.w, 0x7362);
}

struct KTile {
    uint4 low, high;
};

struct Place {
    const uint4 *low, *high;
    int whole; // pieces in which this thread has a run
};

__device__ inline void fetch(KTile &piece, const Place &at, int number) {
    const uint4 zero = {0, 0, 0, 0};
    piece.low = number < at.whole ? load_once(at.low + 4 * number) : zero;
    piece.high = number < at.whole ? load_once(at.high + 4 * number) : zero;
}

// part = 64 rows of the weight's piece times x.
__device__ inline void products(float (&part)[BOX / 2], const KTile &piece, u64 x, u32 full, u32 parity, int place) {
    u32 low[4], high[4];
    to_operand_order(low, piece.low);
    to_operand_order(high, piece.high);
    transpose_quad(low, place);
    transpose_quad(high, place);
    u32 a[8][4];
#pragma unroll
    for (int run = 0; run < 4; ++run) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32(&to)[4] = a[2 * run + half];
            to[0] = biased_int4_pair(low[run], 4 * half), to[1] = biased_int4_pair(high[run], 4 * half);
            to[2] = biased_int4_pair(low[run], 4 * half + 8), to[3] = biased_int4_pair(high[run], 4 * half + 8);
        }
    }
    mbarrier_wait(full, parity);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        // addresses in a descriptor count 16 bytes
        const u64 right = x + (i / 4 * SLAB + i % 4 * 32) / 16;
        wgmma(part, a[i][0], a[i][1], a[i][2], a[i][3], right, i > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 8; ++i) wgmma_fence_operand(a[i]); // they are read until the products have ended
    wgmma_wait<0>();
    wgmma_fence_operand(part);
#pragma unroll
    for (int i = 0; i < 8; ++i) wgmma_fence_operand(a[i]);
}

__device__ inline void flush(float (&total)[BOX / 2], const float (&part)[BOX / 2], float2 low, float2 high,
                             const float2 *sums) {
    const float base_low = (OFFSET ? low.y : -MIDDLE * low.x) - RAISED * low.x;
    const float base_high = (OFFSET ? high.y : -MIDDLE * high.x) - RAISED * high.x;
#pragma unroll
    for (int i = 0; i < BOX / 8; ++i) {
        const float2 sum = sums[4 * i];
        total[4 * i] = fmaf(low.x, part[4 * i], fmaf(base_low, sum.x, total[4 * i]));
        total[4 * i + 1] = fmaf(low.x, part[4 * i + 1], fmaf(base_low, sum.y, total[4 * i + 1]));
        total[4 * i + 2] = fmaf(high.x, part[4 * i + 2], fmaf(base_high, sum.x, total[4 * i + 2]));
        total[4 * i + 3] = fmaf(high.x, part[4 * i + 3], fmaf(base_high, sum.y, total[4 * i + 3]));
    }
}
