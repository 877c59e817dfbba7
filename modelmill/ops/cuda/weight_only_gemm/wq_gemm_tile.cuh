// Shared parts of the weight-only GEMMs whose weights and x come through shared memory by TMA.
//
// Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ: a block's tile, its weight rows and their scales
// in
//     shared memory, split-K reduction and epilogue (bias, SwiGLU)
// Dtypes: weights int8 or packed int4; float16 group scales and offsets (float32 scales with
//     SCALE_FP32); out bfloat16 or float16; float32 sums
// Layout: row-major; scales and offsets [N, groups]
// Range: N a multiple of 8 (GATED: of 16)
// Technique: TMA, split-K over a thread-block cluster (DSMEM)
// Used by: wq_gemm_large_m.cu, wq_gemm_pipelined.cu
//
// A block is three warpgroups: a thread of one loads K tiles of weights and x, the two others
// multiply them, 64 weight rows each. SPLIT blocks of a cluster share K (split-K) and reduce
// through DSMEM in rank order.
//
// Macros: BLOCK_M (rows of x of a block, padded), SPLIT, STAGES (K tiles in flight), GATED (SwiGLU
// of the two halves of N), OFFSET (0: symmetric), SCALE_FP32 (scales are float32), HALF.
#pragma once
#include "common/cluster.cuh"
#include "common/smem_pipeline.cuh"
#include "common/wgmma.cuh"
#include "weight_only_gemm/weight_only_types.cuh"

constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, CONSUMER_THREADS = 128 * CONSUMERS,
              THREADS = CONSUMER_THREADS + 128, PITCH = ROWS + 4;
constexpr u32 RESULT_BYTES = BLOCK_M * PITCH * 4;

struct Work {
    const ScaleT *scale, *offset;  // [N, groups]
    const u16* bias;               // of x's type, or null
    u16* out;
    // shift: log2 of the K tiles per group; pitch: row pitch of the scales; m_tiles: of x;
    // first, tiles: the launch's first weight tile, and how many tiles of the output it computes
    int tokens, rows, k_tiles, groups, shift, pitch, m_tiles, first, tiles;
};
static_assert(sizeof(Work) == 72, "wq_gemm_tile.py packs 72 bytes");

// What a block computes: BLOCK_M rows of x from `token` on, times weight tile `index`, over the K
// of `rank` among the SPLIT blocks of its cluster.
struct Tile {
    int index, token, rank;
};

// The number-th tile. Blocks that run at the same time have the same weights, so that these are
// read once.
__device__ inline Tile tile_of(const Work& w, int number) {
    const int index = number / w.m_tiles;
    return {w.first + index, (number - index * w.m_tiles) * BLOCK_M,
            SPLIT > 1 ? int(cluster_rank()) : 0};
}

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// Attribute of the kernels: SPLIT blocks of a cluster.
#if SPLIT > 1
#    define SPLIT_CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#    define SPLIT_CLUSTER
#endif

// DSMEM load of four floats of block `rank`.
__device__ inline float4 dsmem_load_float4(const float* local, int rank) {
    float4 loaded;
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(loaded.x), "=f"(loaded.y), "=f"(loaded.z), "=f"(loaded.w)
                 : "r"(shared_address(local)), "r"(rank)
                 : "memory");
    return loaded;
}

// Weight row in memory of a row of the stage; rows past the end repeat the last. GATED: gate rows,
// then up.
__device__ inline int row_of(int tile, int mine, int rows) {
    if (GATED) {
        const int half = rows / 2, below = mine >= ROWS / 2;
        return min(tile * (ROWS / 2) + mine - below * (ROWS / 2), half - 1) + below * half;
    }
    return min(tile * ROWS + mine, rows - 1);
}

// Loads a K tile of the weight in PARTS of a few columns each, which begin at byte `byte` of a row.
template <int PARTS, int PART_BYTES>
__device__ inline void load_weight_parts(const TensorMap& map, u32 target, u32 full, int byte,
                                         int tile, int rows) {
    constexpr u32 PART_TILE_BYTES = ROWS * PART_BYTES;
#pragma unroll
    for (int i = 0; i < PARTS; ++i, target += PART_TILE_BYTES, byte += PART_BYTES) {
        if (GATED) {
            tma_load(target, map, full, byte, tile * (ROWS / 2));
            tma_load(target + PART_TILE_BYTES / 2, map, full, byte, rows / 2 + tile * (ROWS / 2));
        } else {
            tma_load(target, map, full, byte, tile * ROWS);
        }
    }
}

// Scale and offset of a row and group: two float16 in a word, or the scale alone if symmetric.
#if OFFSET
typedef u32 ScaleOffset;
__device__ inline ScaleOffset pack_scale_offset(u16 scale, u16 offset) {
    return scale | static_cast<u32>(offset) << 16;
}
#else
typedef ScaleT ScaleOffset;
__device__ inline ScaleOffset pack_scale_offset(ScaleT scale, ScaleT) { return scale; }
#endif
__device__ inline float scale_of(u32 both) { return half_to_float(both & 0xFFFF); }
__device__ inline float scale_of(u16 scale) { return half_to_float(scale); }
__device__ inline float scale_of(float scale) { return scale; }

// Copies the scales of the block's rows and of `count` groups to shared memory, by WARPS warps. A
// warp issues the loads of BATCH rows before their first store; one after the other they took a
// third of the kernel's time.
template <int WARPS, int BATCH>
__device__ inline void stage_scales(const Work& w, ScaleOffset* grids, int tile, int first,
                                    int count, int warp) {
    for (int g = threadIdx.x % 32; g < count; g += 32) {
        for (int row = warp; row < ROWS; row += WARPS * BATCH) {
            ScaleT scale[BATCH], offset[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const long long at =
                    static_cast<long long>(row_of(tile, min(row + i * WARPS, ROWS - 1), w.rows)) *
                        w.groups +
                    first + g;
                scale[i] = __ldg(w.scale + at);
                offset[i] = OFFSET ? __ldg(w.offset + at) : ScaleT(0);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                grids[min(row + i * WARPS, ROWS - 1) * w.pitch + g] =
                    pack_scale_offset(scale[i], offset[i]);
        }
    }
}

// Keeps a consumer's accumulators as results [BLOCK_M][PITCH], where the pipeline was; low, high:
// columns there of the thread's two weight rows. GATED: eight gates, then the eight values beside.
__device__ inline void store_results(const float (&total)[BLOCK_M / 2], int low, int high) {
    float* results = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; ++i) {
        const int token = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        results[token * PITCH + (i % 4 < 2 ? low : high)] = total[i];
    }
}

// Reduces four adjacent columns over the blocks of the cluster.
__device__ inline void summed(float (&sum)[4], const float* at, const u16* bias, int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) {
        const float4 loaded =
            SPLIT > 1 ? dsmem_load_float4(at, rank) : *reinterpret_cast<const float4*>(at);
        sum[0] += loaded.x, sum[1] += loaded.y, sum[2] += loaded.z, sum[3] += loaded.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (bias) sum[i] += to_float(bias[column + i]);
}

// Stores this block's output rows, all columns of the tile (a multiple of 8).
__device__ inline void finish(const Work& w, Tile tile) {
    constexpr int SPAN = GATED ? ROWS / 2 : ROWS, FOURS = SPAN / 4,
                  PER_RANK = (BLOCK_M + SPLIT - 1) / SPLIT;
    const float* results = reinterpret_cast<const float*>(shared);
    const int columns = GATED ? w.rows / 2 : w.rows;
    for (int i = threadIdx.x; i < PER_RANK * FOURS; i += CONSUMER_THREADS) {
        const int own_token = tile.rank * PER_RANK + i / FOURS, token = tile.token + own_token,
                  own_column = i % FOURS * 4, column = tile.index * SPAN + own_column;
        if (own_token >= BLOCK_M || token >= w.tokens || column >= columns) continue;
        const float* at = results + own_token * PITCH +
                          (GATED ? own_column / 8 * 16 + own_column % 8 : own_column);
        float sum[4];
        summed(sum, at, w.bias, column);
        u16 result[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) result[j] = rounded(sum[j]);
        if (GATED) {
            summed(sum, at + 8, w.bias, column + columns);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                result[j] = rounded(silu_mul(to_float(result[j]), to_float(rounded(sum[j]))));
        }
        const uint2 four = {result[0] | static_cast<u32>(result[1]) << 16,
                            result[2] | static_cast<u32>(result[3]) << 16};
        *reinterpret_cast<uint2*>(w.out + static_cast<long long>(token) * columns + column) = four;
    }
}
