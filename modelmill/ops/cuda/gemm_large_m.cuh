// Products of many rows (prompts) as far as their sums: d[t, n] = sum_k x[t, k] · w[n, k], 16 bits, sums in float32. What
// becomes of a tile of them is its kernel's own: an Epilogue.
//
// Two blocks, a cluster, compute two tiles of 128 rows of x each and the same WIDE rows of w: each block brings its own
// rows of x and half of those of w, which go to both. A block is three warpgroups: one thread of the first keeps STAGES
// slabs of 64 columns on their way, tile after tile without a pause; the other two multiply, 64 rows of x each. A
// finished tile is only rounded, and goes its way while the next tile's products run.
//
// What is needed there (a residual, angles) should not be read from memory into a multiplying warpgroup's registers:
// products begin when all registers of a warpgroup are at rest, so that each load on its way holds them up by its whole
// latency. It comes to shared memory by the copy engine, or is other warps' work, as little of it as can be: arithmetic
// beside products slows them, whoever does it.
//
// Macros: WIDE (256, 224), BAND (pairs of tiles of x that are served together, while they lie in the cache), HALF
// (float16 for bfloat16).
#pragma once
#include "cluster.cuh"
#include "smem_pipeline.cuh"
#include "wgmma.cuh"

// DEPTH: columns of a slab, 128 bytes, the widest that the swizzle allows. STAGES: as many as fit, beside the output, into
// the 227 KB that a block may have.
constexpr int ROWS = 128, DEPTH = 64, STAGES = 4, CONSUMERS = 2, THREADS = 384, CLUSTER = 2;
constexpr int HALF_WIDE = WIDE / 2; // rows of w that each block brings
constexpr u32 X_BYTES = ROWS * DEPTH * 2, W_BYTES = WIDE * DEPTH * 2, W_HALF = W_BYTES / CLUSTER;
constexpr u32 AT_W = STAGES * X_BYTES, AT_OUT = AT_W + STAGES * W_BYTES;
constexpr int SUMS = WIDE / 2, PACKED = SUMS / 2; // registers of a tile; of one that is rounded
static_assert(W_HALF % 1024 == 0, "");

// wide: columns of the output that a tile has; across: tiles of them. other: from the rows of w of a tile's first half to
// those of its second.
struct Sizes {
    int tokens, n, slabs, across, wide, other;
};

typedef PipelineBarriers<STAGES> Barriers;
typedef PipelineState<STAGES> Place;

struct Tile {
    int row, column; // of the output where it begins
};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ inline int pairs(const Sizes &sizes) { return (sizes.tokens + CLUSTER * ROWS - 1) / (CLUSTER * ROWS); }

// Bands of rows of x, and in each all of w, some rows of w after the other.
__device__ inline Tile tile_of(const Sizes &sizes, int index, int rank) {
    const int all = pairs(sizes), band = index / (BAND * sizes.across), left = index - band * BAND * sizes.across;
    const int high = all - band * BAND < BAND ? all - band * BAND : BAND;
    return {((band * BAND + left % high) * CLUSTER + rank) * ROWS, left / high * sizes.wide};
}

// Every tile of this pair of blocks, in its turn.
template <typename Body> __device__ __forceinline__ void each_tile(const Sizes &sizes, Body body) {
    const int count = pairs(sizes) * sizes.across, rank = cluster_rank();
    for (int index = blockIdx.x / CLUSTER; index < count; index += gridDim.x / CLUSTER) body(tile_of(sizes, index, rank));
}

__device__ void load(const TensorMap &x_map, const TensorMap &w_map, const Sizes &sizes, Barriers &barriers) {
    const u32 base = shared_address(shared);
    const int rank = cluster_rank();
    auto x_of = [&](const Tile &tile, int slab, int stage) {
        tma_load(base + stage * X_BYTES, x_map, shared_address(&barriers.full[stage]), slab * DEPTH, tile.row);
    };
    auto w_of = [&](const Tile &tile, int slab, int stage) {
        const u32 full = shared_address(&barriers.full[stage]);
        mbarrier_arrive_expect_tx(full, X_BYTES + W_BYTES);
        const int held = tile.column + rank * sizes.other; // one block brings the first half, the other the second
        tma_load_multicast(base + AT_W + stage * W_BYTES + rank * W_HALF, w_map, full, slab * DEPTH, held, 3);
    };
    // The first weights are on their way while the kernel in front computes x.
    const int ahead = sizes.slabs < STAGES ? sizes.slabs : STAGES;
    const Tile begun = tile_of(sizes, blockIdx.x / CLUSTER, rank);
    for (int slab = 0; slab < ahead; ++slab) w_of(begun, slab, slab);
    pdl_wait();
    for (int slab = 0; slab < ahead; ++slab) x_of(begun, slab, slab);
    Place at;
    int waiting = ahead; // slabs that are on their way already
    each_tile(sizes, [&](Tile tile) {
        for (int slab = 0; slab < sizes.slabs; ++slab, at.advance()) {
            if (waiting-- > 0) continue;
            mbarrier_wait(shared_address(&barriers.empty[at.stage]), at.parity ^ 1);
            w_of(tile, slab, at.stage);
            x_of(tile, slab, at.stage);
        }
    });
}

// A consumer's share of a tile on its way out: PARTS of it one after the other, each in PIECES, a piece a slab.
// held[2i], held[2i + 1]: columns 8i + 2·(t % 4), +1 of the thread's first row and of the one 8 below.
struct OutputTile {
    u32 held[PACKED];
    Tile tile;
};

// The products of a consumer. An Epilogue has
// * PARTS and PIECES; ``piece<PART, PIECE>(leaving)``: puts a piece of a tile on its way while products run;
// * ``begun(tile)``: a tile's first products run;  * ``round(leaving, sums)``: they are there;  * ``end()``: all tiles are.
template <typename Epilogue> struct Multiply {
    Epilogue &exit;
    const Sizes &sizes;
    Barriers &barriers;
    const int consumer, lane = threadIdx.x % 32;
    Place at{};
    int last = -1; // the stage that was read last, until all products of it have ended
    int done = 0;  // slabs of the tile
    OutputTile leaving{};
    bool waits = false; // whether ``leaving`` holds a tile
    float d[SUMS];

    __device__ __forceinline__ void release() const {
        if (last >= 0 && lane < CLUSTER) mbarrier_arrive_cluster(shared_address(&barriers.empty[last]), lane);
    }

    __device__ __forceinline__ void slab() {
        const u32 base = shared_address(shared);
        mbarrier_wait(shared_address(&barriers.full[at.stage]), at.parity);
        const u32 x = base + at.stage * X_BYTES + consumer * (X_BYTES / CONSUMERS), w = base + AT_W + at.stage * W_BYTES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i)
            wgmma(d, k_major_descriptor(x + i * 32, EIGHT_ROWS), k_major_descriptor(w + i * 32, EIGHT_ROWS), done > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>(); // those of the slab before
        release();
        last = at.stage;
        at.advance();
        ++done;
    }

    template <int PART, int PIECE> __device__ __forceinline__ void pieces(const Tile &tile) {
        if constexpr (PIECE < Epilogue::PIECES) {
            if (done < sizes.slabs) slab();
            if (PART == 0 && PIECE == 0) exit.begun(tile);
            if (waits) exit.template piece<PART, PIECE>(leaving);
            pieces<PART, PIECE + 1>(tile);
        }
    }

    template <int PART> __device__ __forceinline__ void parts(const Tile &tile) {
        if constexpr (PART < Epilogue::PARTS) {
            pieces<PART, 0>(tile);
            while (done * Epilogue::PARTS < sizes.slabs * (PART + 1)) slab();
            parts<PART + 1>(tile);
        }
    }

    template <int PART, int PIECE> __device__ __forceinline__ void rest() {
        if constexpr (PIECE < Epilogue::PIECES) {
            exit.template piece<PART, PIECE>(leaving);
            rest<PART, PIECE + 1>();
        } else if constexpr (PART + 1 < Epilogue::PARTS) {
            rest<PART + 1, 0>();
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
            leaving.tile = {tile.row + consumer * 64, tile.column};
            exit.round(leaving, d);
            waits = true;
        });
        if (waits) rest<0, 0>();
        exit.end();
    }
};

// Blocks begin so: the ring's barriers are made, and with ``own`` the kernel's.
template <typename Own> __device__ __forceinline__ void begin(Barriers &barriers, Own own) {
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4 * CLUSTER); // a warp, for each block
        own();
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
}
