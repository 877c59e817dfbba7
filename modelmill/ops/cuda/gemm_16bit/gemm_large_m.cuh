// Persistent warp-specialized GEMM main loop for many rows (prefill); the epilogue is the including
//     kernel's.
//
// Computes: d[M, N] = x[M, K] · w[N, K]ᵀ
// Dtypes: x, w and d bfloat16 or float16; float32 accumulators
// Layout: x and w row-major; tiles in shared memory (128-byte swizzle)
// Range: M ≥ 512; rows of x and w 16-byte aligned
// Technique: TMA with multicast, mbarrier pipeline, wgmma, cluster of 2, PDL
// Used by: gemm_swiglu_large_m.cu, qkv_rope_cache.cu
//
// A cluster of two blocks computes two tiles of 128 rows of x and the same BLOCK_N rows of w: each
// block loads its own rows of x and half of the rows of w, which TMA multicasts to both. A block is
// three warpgroups: one producer thread fills a pipeline of STAGES K tiles of 64 columns, across
// tile boundaries; two consumer warpgroups compute 64 rows each with wgmma. A finished tile is
// rounded to 16 bits in registers and stored slice by slice while the wgmmas of the next tile run.
//
// Epilogue operands (bias, angles) should not be loaded from global memory into registers of a
// consumer warpgroup: wgmma waits until all its registers are ready, so each pending load delays it
// by the whole latency. Load them to shared memory by TMA, or in other warps, and keep epilogue
// arithmetic small.
//
// Macros: BLOCK_N (256, 224), BAND (pairs of M tiles that are processed together for L2 reuse),
// HALF (float16 instead of bfloat16).
#pragma once
#include "common/cluster.cuh"
#include "common/smem_pipeline.cuh"
#include "common/wgmma.cuh"

// BLOCK_K: 128 bytes, the widest row of the 128-byte swizzle. STAGES: as many as fit beside the
// output in the 227 KB of shared memory of a block.
constexpr int BLOCK_M = 128, BLOCK_K = 64, STAGES = 4, CONSUMERS = 2, THREADS = 384, CLUSTER = 2;
constexpr int HALF_BLOCK_N = BLOCK_N / 2;  // rows of w that each block loads
constexpr u32 X_BYTES = BLOCK_M * BLOCK_K * 2, W_BYTES = BLOCK_N * BLOCK_K * 2,
              W_HALF = W_BYTES / CLUSTER;
constexpr u32 AT_W = STAGES * X_BYTES, AT_OUT = AT_W + STAGES * W_BYTES;
// accumulator registers of a tile; registers once rounded
constexpr int SUMS = BLOCK_N / 2, PACKED = SUMS / 2;
static_assert(W_HALF % 1024 == 0, "");

// out_columns: output columns per tile; tiles_n: tiles along N; up_offset: distance in rows of w
// from a tile's first half to its second.
struct Sizes {
    int tokens, n, k_tiles, tiles_n, out_columns, up_offset;
};

typedef PipelineBarriers<STAGES> Barriers;
typedef PipelineState<STAGES> State;

struct Tile {
    int row, column;  // of the tile's first output element
};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ inline int tile_pairs(const Sizes& sizes) {
    return (sizes.tokens + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M);
}

// Rasterization: bands of BAND M tiles; within a band M runs fastest.
__device__ inline Tile tile_of(const Sizes& sizes, int index, int rank) {
    const int all = tile_pairs(sizes), band = index / (BAND * sizes.tiles_n),
              left = index - band * BAND * sizes.tiles_n;
    const int high = all - band * BAND < BAND ? all - band * BAND : BAND;
    return {((band * BAND + left % high) * CLUSTER + rank) * BLOCK_M,
            left / high * sizes.out_columns};
}

// Calls body for every tile of this cluster.
template <typename Body> __device__ __forceinline__ void each_tile(const Sizes& sizes, Body body) {
    const int count = tile_pairs(sizes) * sizes.tiles_n, rank = cluster_rank();
    for (int index = blockIdx.x / CLUSTER; index < count; index += gridDim.x / CLUSTER)
        body(tile_of(sizes, index, rank));
}

__device__ void load(const TensorMap& x_map, const TensorMap& w_map, const Sizes& sizes,
                     Barriers& barriers) {
    const u32 base = shared_address(shared);
    const int rank = cluster_rank();
    auto load_x = [&](const Tile& tile, int k_tile, int stage) {
        tma_load(base + stage * X_BYTES, x_map, shared_address(&barriers.full[stage]),
                 k_tile * BLOCK_K, tile.row);
    };
    auto load_w = [&](const Tile& tile, int k_tile, int stage) {
        const u32 full = shared_address(&barriers.full[stage]);
        mbarrier_arrive_expect_tx(full, X_BYTES + W_BYTES);
        const int w_row = tile.column + rank * sizes.up_offset;  // each block loads one half
        tma_load_multicast(base + AT_W + stage * W_BYTES + rank * W_HALF, w_map, full,
                           k_tile * BLOCK_K, w_row, 3);
    };
    // PDL: the first weights are loaded while the previous kernel still computes x.
    const int ahead = sizes.k_tiles < STAGES ? sizes.k_tiles : STAGES;
    const Tile on_tile_start = tile_of(sizes, blockIdx.x / CLUSTER, rank);
    for (int k_tile = 0; k_tile < ahead; ++k_tile) load_w(on_tile_start, k_tile, k_tile);
    pdl_wait();
    for (int k_tile = 0; k_tile < ahead; ++k_tile) load_x(on_tile_start, k_tile, k_tile);
    State at;
    int in_flight = ahead;  // K tiles that were issued before the loop
    each_tile(sizes, [&](Tile tile) {
        for (int k_tile = 0; k_tile < sizes.k_tiles; ++k_tile, at.advance()) {
            if (in_flight-- > 0) continue;
            mbarrier_wait(shared_address(&barriers.empty[at.stage]), at.parity ^ 1);
            load_w(tile, k_tile, at.stage);
            load_x(tile, k_tile, at.stage);
        }
    });
}

// A consumer's rounded output tile, stored in PARTS of SLICES, one slice per K tile of the next
// tile. packed[2i], packed[2i + 1]: columns 8i + 2·(t % 4), + 1 of the thread's first row and of
// that + 8.
struct OutputTile {
    u32 packed[PACKED];
    Tile tile;
};

// Main loop of a consumer warpgroup. An Epilogue has
// * PARTS, SLICES and store_slice<PART, SLICE>(out_tile): stores a slice while wgmmas run;
// * on_tile_start(tile): called after the tile's first wgmmas were issued;
// * convert(out_tile, d): rounds the accumulators;  * finish(): called after the last tile.
template <typename Epilogue> struct Multiply {
    Epilogue& epilogue;
    const Sizes& sizes;
    Barriers& barriers;
    const int consumer, lane = threadIdx.x % 32;
    State at{};
    int last = -1;  // stage read by the wgmmas that may still run
    int done = 0;   // K tiles of the current tile
    OutputTile out_tile{};
    bool has_output = false;  // whether out_tile holds a tile
    float d[SUMS];

    __device__ __forceinline__ void release() const {
        if (last >= 0 && lane < CLUSTER)
            mbarrier_arrive_cluster(shared_address(&barriers.empty[last]), lane);
    }

    __device__ __forceinline__ void k_tile() {
        const u32 base = shared_address(shared);
        mbarrier_wait(shared_address(&barriers.full[at.stage]), at.parity);
        const u32 x = base + at.stage * X_BYTES + consumer * (X_BYTES / CONSUMERS),
                  w = base + AT_W + at.stage * W_BYTES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i)
            wgmma(d, k_major_descriptor(x + i * 32, SWIZZLE_ATOM_BYTES),
                  k_major_descriptor(w + i * 32, SWIZZLE_ATOM_BYTES), done > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>();  // those of the previous K tile
        release();
        last = at.stage;
        at.advance();
        ++done;
    }

    template <int PART, int SLICE> __device__ __forceinline__ void slices(const Tile& tile) {
        if constexpr (SLICE < Epilogue::SLICES) {
            if (done < sizes.k_tiles) k_tile();
            if (PART == 0 && SLICE == 0) epilogue.on_tile_start(tile);
            if (has_output) epilogue.template store_slice<PART, SLICE>(out_tile);
            slices<PART, SLICE + 1>(tile);
        }
    }

    template <int PART> __device__ __forceinline__ void parts(const Tile& tile) {
        if constexpr (PART < Epilogue::PARTS) {
            slices<PART, 0>(tile);
            while (done * Epilogue::PARTS < sizes.k_tiles * (PART + 1)) k_tile();
            parts<PART + 1>(tile);
        }
    }

    template <int PART, int SLICE> __device__ __forceinline__ void drain() {
        if constexpr (SLICE < Epilogue::SLICES) {
            epilogue.template store_slice<PART, SLICE>(out_tile);
            drain<PART, SLICE + 1>();
        } else if constexpr (PART + 1 < Epilogue::PARTS) {
            drain<PART + 1, 0>();
        }
    }

    __device__ __forceinline__ void run() {
        each_tile(sizes, [&](Tile tile) {
            done = 0;
            parts<0>(tile);
            wgmma_wait<0>();
            wgmma_fence_operand(d);
            release();
            last = -1;
            out_tile.tile = {tile.row + consumer * 64, tile.column};
            epilogue.convert(out_tile, d);
            has_output = true;
        });
        if (has_output) drain<0, 0>();
        epilogue.finish();
    }
};

// Initializes the pipeline's barriers and, by own(), those of the kernel.
template <typename Own> __device__ __forceinline__ void init_block(Barriers& barriers, Own own) {
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4 * CLUSTER);  // one arrival per consumer warp of each block
        own();
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
}
