// Weight-only int8 GEMM for few rows, bound by weight bandwidth.
//
// Computes: out[M, N] = sum over groups of scale · (x · codes) + offset · sum(x) (+ bias[N]), M ≤ 8
//     · M_TILES; with GATED SwiGLU of the two halves of N
// Dtypes: x and out bfloat16 or float16; weights int8; float16 or float32 scales and offsets;
//     float32 sums
// Layout: row-major x[M, K], weight [N, K] and out; scales and offsets [N, groups]
// Range: 1 ≤ M ≤ 64 where wq_gemv.cu, wq_gemm_small_m.cu and wq_gemm_pipelined.cu do not apply; K
//     a multiple of 32
// Technique: mma.sync m16n8k16, register prefetch of PREFETCH K tiles, PDL
// Ops: int8_linear, int8_linear_swiglu, int8_group_linear (launched by int8_gemm_small_m.py)
//
// Each quad loads a K tile of two weight rows, a quarter per thread, 16 bytes at a time for K tiles
// of 64 or 128 columns, else 8. Bytes 0 and 2 of a word become one pair of floats, 1 and 3 another
// (dequant_int8.cuh); x is permuted along K in the same way, so the registers are the A fragment of
// mma.m16n8k16 without shuffles (mma.cuh). sum(x), needed for the offsets, is one more mma with
// ones as A.
//
// Macros: those of weight_only.cuh, OFFSET (0: symmetric), K_TILE (columns: 128, 64 or 32), BLOCKS
// (per SM, for __launch_bounds__).
#include "weight_only_gemm/weight_only.cuh"
#include "weight_only_gemm/dequant_int8.cuh"

constexpr int WORDS = K_TILE / 16;  // of a thread's quarter of a K tile
// load instructions for it, 64 columns apart
constexpr int LOADS = WORDS == 2 ? 1 : WORDS / 4;
constexpr int EACH = WORDS / LOADS;  // words per load

using KTile = WeightTile<u32, WORDS>;  // a thread's quarter of it
struct Pointers : ThreadPointers<u32, u16> {
    int column;  // first column
};

// Whether this thread's load of a K tile is inside the matrix.
__device__ inline bool in_bounds(const WeightOnlyWork& w, const Pointers& at, int k_tile,
                                 int load) {
    return K_TILE == 32 || at.column + K_TILE * k_tile + 64 * load < w.row_length;
}

__device__ inline void fetch(KTile& tile, const WeightOnlyWork& w, const Pointers& at, int k_tile) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        u32 *low = tile.low + EACH * i, *high = tile.high + EACH * i;
        if (in_bounds(w, at, k_tile, i)) {
            fetch_words<EACH>(low, at.low + K_TILE / 4 * k_tile + 16 * i);
            fetch_words<EACH>(high, at.high + K_TILE / 4 * k_tile + 16 * i);
        } else {
#pragma unroll
            for (int j = 0; j < EACH; ++j) low[j] = high[j] = 0;
        }
    }
}

// total += 16 weight rows times up to 8 M_TILES rows of x, for one K tile.
__device__ inline void add(float (&total)[M_TILES][4], const KTile& tile, const WeightOnlyWork& w,
                           const Pointers& at, int k_tile) {
    float part[M_TILES][4] = {}, sums[M_TILES][4] = {};
#pragma unroll
    for (int j = 0; j < WORDS; j += 2) {
        u32 low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int by = i % 2 * 8;
            low[i] = dequant_int8_pair(tile.low[j + i / 2] >> by),
            high[i] = dequant_int8_pair(tile.high[j + i / 2] >> by);
        }
        const int load = j / EACH;
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
            uint4 x = {0, 0, 0, 0};  // of the two words' columns
            const int column = K_TILE * k_tile + 64 * load + 4 * (j % EACH);
            if (at.x[n] && in_bounds(w, at, k_tile, load))
                x = *reinterpret_cast<const uint4*>(at.x[n] + column);
            const u32 even = __byte_perm(x.x, x.y, 0x5410), odd = __byte_perm(x.x, x.y, 0x7632);
            const u32 next_even = __byte_perm(x.z, x.w, 0x5410),
                      next_odd = __byte_perm(x.z, x.w, 0x7632);
            mma(part[n], low[0], high[0], low[1], high[1], even, odd);
            mma(part[n], low[2], high[2], low[3], high[3], next_even, next_odd);
            if (OFFSET) {
                mma(sums[n], ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, even, odd);
                mma(sums[n], ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, next_even, next_odd);
            }
        }
    }
    const int group = k_tile >> w.shift;
    const float2 first = at.grid_low[group], second = at.grid_high[group];
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            total[n][c] += first.x * part[n][c];
            total[n][2 + c] += second.x * part[n][2 + c];
            if (OFFSET)
                total[n][c] += first.y * sums[n][c], total[n][2 + c] += second.y * sums[n][c];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    int8_gemm_small_m(const __grid_constant__ WeightOnlyWork w) {
    extern __shared__ __align__(16) unsigned char shared[];
    float2* grids = reinterpret_cast<float2*>(shared);
    const ThreadTile me = thread_tile(w.rows);
    Pointers at = {{w.weight + me.low * (w.row_length / 4) + me.quad_lane * EACH,
                    w.weight + me.high * (w.row_length / 4) + me.quad_lane * EACH,
                    grids + me.local_row * (w.groups + 1),
                    grids + (me.local_row + 8) * (w.groups + 1)}};
    at.column = 4 * EACH * me.quad_lane;
    input_row_pointers(at.x, w.x + at.column, w.x_stride, me.quad, w.tokens);
    float total[M_TILES][4] = {};
    pipelined_k_loop<KTile>(
        me.warp_k, (w.row_length + K_TILE - 1) / K_TILE,
        [&](KTile& tile, int k_tile) { fetch(tile, w, at, k_tile); },
        [&] {
            stage_scales(grids, w.scale, OFFSET ? w.offset : nullptr, nullptr, w.rows, w.groups);
            pdl_enter(w.tokens);
        },
        [&](const KTile& tile, int k_tile) { add(total, tile, w, at, k_tile); });
    finish(total, nullptr, w.bias, w.out, w.rows, w.tokens);
}
