// Shared parts of the small-M weight-only kernels with mma.sync.
//
// Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ: thread-to-row mapping, scales in shared memory,
//     the K loop, the reduction across warps and the epilogue (bias, SwiGLU)
// Dtypes: x bfloat16, float16 or int8; weights of 4 or 8 bits with group scales
// Layout: row-major; scales and offsets [N, groups] in shared memory
// Range: M ≤ 8 · M_TILES ≤ 64
// Technique: register-prefetched K loop, streaming loads without L1 allocation, PDL
// Used by: int4_linear.cu, int8_gemm_small_m.cu, rptq_linear.cu
//
// A block has 8 warps: WARPS_N of them own 16 weight rows each (tile_rows.cuh), WARPS_K = 8 /
// WARPS_N split K. x is processed in tiles of 8 rows, the N of mma.sync (mma.cuh).
//
// Macros: M_TILES (tiles of 8 rows of x), WARPS_N, PREFETCH (K tiles that a warp has in flight),
// and those of tile_rows.cuh, weight_only_types.cuh and half_types.cuh.
#pragma once
#include "common/mma.cuh"
#include "weight_only_gemm/weight_only_types.cuh"
#include "weight_only_gemm/tile_rows.cuh"

constexpr int WARPS = 8, WARPS_K = WARPS / WARPS_N, THREADS = 32 * WARPS;

// Weight row in memory of row `local_row` (0 … 16 WARPS_N − 1) of the block.
__device__ inline int row_of(int local_row, int rows) {
    return weight_row<16 * WARPS_N>(blockIdx.x, local_row, rows);
}

// A thread's position: its warp along K, its quad and its lane in it (mma.cuh), the quad's first
// row within the block (the second is + 8), and its two weight rows in memory.
struct ThreadTile {
    int warp_k, quad, quad_lane, local_row;
    long long low, high;
};

__device__ __forceinline__ ThreadTile thread_tile(int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4,
              local_row = warp % WARPS_N * 16 + quad;
    return {warp / WARPS_N,
            quad,
            lane % 4,
            local_row,
            row_of(local_row, rows),
            row_of(local_row + 8, rows)};
}

// Arguments of a kernel whose x has 16 bits; strides are in elements.
struct WeightOnlyWork {
    const u16* x;
    const u32* weight;
    const ScaleT *scale, *offset;  // [N, groups]
    const u16* bias;               // of x's type, or null
    u16* out;
    int tokens, rows;
    int row_length;  // K in columns; of packed codes in runs of 32 columns
    int x_stride, groups;
    int shift;  // log2 of the K tiles that share a scale
};
static_assert(sizeof(WeightOnlyWork) == 72, "int4_linear.py, int8_gemm_small_m.py pack 72 bytes");

// A thread's pointers: its part of the first K tile of two weight rows, their scales, its rows of x
// (null: the row does not exist).
template <typename Word, typename X> struct ThreadPointers {
    const Word *low, *high;
    const float2 *grid_low, *grid_high;
    const X* x[M_TILES];
};

// A thread's part of a K tile of two weight rows.
template <typename Word, int COUNT> struct WeightTile {
    Word low[COUNT], high[COUNT];
};

// Pointers to this thread's rows of x, `stride` apart; null where the row does not exist.
template <typename T>
__device__ __forceinline__ void input_row_pointers(const T* (&rows_out)[M_TILES], const T* x,
                                                   long long stride, int quad, int tokens) {
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
        const int token = quad + 8 * n;
        rows_out[n] = token < tokens ? x + token * stride : nullptr;
    }
}

// Loads COUNT (1, 2, 4) words of the weight without allocating in L1.
template <int COUNT> __device__ __forceinline__ void fetch_words(u32* rows_out, const u32* from) {
    if constexpr (COUNT == 4) {
        const uint4 loaded = load_once(reinterpret_cast<const uint4*>(from));
        rows_out[0] = loaded.x, rows_out[1] = loaded.y, rows_out[2] = loaded.z,
        rows_out[3] = loaded.w;
    } else if constexpr (COUNT == 2) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(rows_out[0]), "=r"(rows_out[1])
                     : "l"(from));
    } else {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(rows_out[0]) : "l"(from));
    }
}

// Loop over this warp's K tiles: `first` and every WARPS_K-th after it. PREFETCH tiles are loaded
// into registers before ready() and stay in flight from then on. fetch(tile, k_tile), add(tile,
// k_tile).
template <typename KTile, typename Fetch, typename Ready, typename Add>
__device__ __forceinline__ void pipelined_k_loop(int first, int k_tiles, Fetch fetch, Ready ready,
                                                 Add add) {
    KTile prefetched[PREFETCH];
#pragma unroll
    for (int s = 0; s < PREFETCH; ++s) {
        const int k_tile = first + s * WARPS_K;
        if (k_tile < k_tiles) fetch(prefetched[s], k_tile);
    }
    ready();
    for (int start = first; start < k_tiles; start += PREFETCH * WARPS_K) {
#pragma unroll
        for (int s = 0; s < PREFETCH; ++s) {
            const int k_tile = start + s * WARPS_K, next = k_tile + PREFETCH * WARPS_K;
            if (k_tile < k_tiles) {
                const KTile tile = prefetched[s];
                if (next < k_tiles) fetch(prefetched[s], next);
                add(tile, k_tile);
            }
        }
    }
}

// Copies {scale, offset} of the block's rows to shared memory as float32, with a row pitch of
// groups + 1 pairs to avoid bank conflicts. step: factor of each group, or null.
__device__ inline void stage_scales(float2* rows_out, const ScaleT* scale, const ScaleT* offset,
                                    const float* step, int rows, int groups) {
    for (int i = threadIdx.x; i < 16 * WARPS_N * groups; i += THREADS) {
        const int local_row = i / groups, g = i - local_row * groups;
        const long long at = static_cast<long long>(row_of(local_row, rows)) * groups + g;
        const float by = step ? step[g] : 1.0f;
        rows_out[local_row * (groups + 1) + g] = {scale_to_float(scale[at]) * by,
                                                  offset ? scale_to_float(offset[at]) * by : 0.0f};
    }
    __syncthreads();
}

// PDL: with one row of x the next kernel may start at once; with more rows only after the wait,
// since its blocks would compete for the SMs.
__device__ inline void pdl_enter(int tokens) {
    if (M_TILES == 1 && tokens == 1) {
        pdl_launch_dependents();
    }
    pdl_wait();
    if (tokens > 1) {
        pdl_launch_dependents();
    }
}

// Sum over the warps along K, plus constant and bias.
__device__ inline float summed(const float (&partial)[WARPS][M_TILES * 4][32], int r, int i, int l,
                               const float* constant, const Out* bias, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS_K; ++k) {
        sum += partial[k * WARPS_N + r][i][l];
    }
    if (constant) {
        sum += constant[row];
    }
    return bias ? sum + out_value(bias[row]) : sum;
}

// Epilogue. total[n][c] is the accumulator of x tile n, weight row quad + 8 (c / 2), x row
// 2 quad_lane + c % 2.
__device__ inline void finish(const float (&total)[M_TILES][4], const float* constant,
                              const Out* bias, Out* out, int rows, int tokens) {
    __shared__ float partial[WARPS][M_TILES * 4][32];
#pragma unroll
    for (int i = 0; i < M_TILES * 4; ++i) {
        partial[threadIdx.x / 32][i][threadIdx.x % 32] = total[i / 4][i % 4];
    }
    __syncthreads();
    constexpr int EACH = GATED ? 2 : 4;  // accumulators of a tile per thread; GATED: pairs
    const int wide = GATED ? rows / 2 : rows;
    for (int at = threadIdx.x; at < WARPS_N * M_TILES * EACH * 32; at += THREADS) {
        const int l = at % 32, e = at / 32 % EACH, n = at / (32 * EACH) % M_TILES,
                  r = at / (32 * EACH * M_TILES), i = n * 4 + e;
        const int row = (blockIdx.x * WARPS_N + r) * (GATED ? 8 : 16) + l / 4 + (e >= 2 ? 8 : 0);
        const int token = n * 8 + l % 4 * 2 + e % 2;
        if (row < wide && token < tokens) {
            Out result = as_out(summed(partial, r, i, l, constant, bias, row));
            if (GATED) {
                const Out up = as_out(summed(partial, r, i + 2, l, constant, bias, row + wide));
                result = as_out(silu_mul(out_value(result), out_value(up)));
            }
            out[static_cast<long long>(token) * wide + row] = result;
        }
    }
}
