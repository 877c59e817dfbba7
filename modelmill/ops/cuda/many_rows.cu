// Gated products of many rows (prompts): out[t, n] = silu(gate) · up, gate[t, n] = sum_k x[t, k] · w[n, k] (+ bias[n]), up
// the same with the other half of w's rows; neither reaches memory. 16 bits, sums in float32.
//
// Two blocks, a cluster, compute two tiles of 128 rows of x each and the same WIDE rows of w: each block brings its own
// rows of x and half of those of w, which go to both. A block is three warpgroups: one thread of the first keeps STAGES
// slabs of 64 columns on their way, tile after tile without a pause; the other two multiply, 64 rows of x each. Half of
// w's rows are of the gate and the others the same of the other half, so that a thread holds both values of an output.
// The gate is computed and stored while the next tile's products run: only rounding stands between two tiles.
//
// What would be read from memory there (a residual, angles) cannot be: products begin when all registers of a warpgroup
// are at rest, so that each load on its way holds them up by its whole latency.
//
// Macros: WIDE (256, 224), BIAS (0, 1), BAND (pairs of tiles of x that are served together, while they lie in the cache),
// HALF (float16 for bfloat16).
#include "cluster.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

// DEPTH: columns of a slab, 128 bytes, the widest that the swizzle allows. STAGES: as many as fit, beside the output, into
// the 227 KB that a block may have.
constexpr int ROWS = 128, DEPTH = 64, STAGES = 4, WORKERS = 2, THREADS = 384, CLUSTER = 2;
constexpr int OUT_WIDE = WIDE / 2;
constexpr u32 X_BYTES = ROWS * DEPTH * 2, W_BYTES = WIDE * DEPTH * 2, W_HALF = W_BYTES / CLUSTER;
// The output leaves in boxes of 64 rows and BOX columns; those of 64 columns are swizzled, narrower ones are not.
constexpr int BOX = OUT_WIDE % 64 ? 16 : 64;
constexpr u32 BOX_BYTES = 64 * BOX * 2, OUT_BYTES = 64 * OUT_WIDE * 2; // OUT_BYTES: of a worker
constexpr u32 AT_W = STAGES * X_BYTES, AT_OUT = AT_W + STAGES * W_BYTES, AT_BARRIERS = AT_OUT + WORKERS * OUT_BYTES;
constexpr int SUMS = WIDE / 2, PACKED = SUMS / 2; // registers of a tile; of one that waits for its gate
constexpr int PIECES = OUT_WIDE / 16;             // in which that is done, one a slab: 16 columns
static_assert(PIECES <= 8 && OUT_WIDE % BOX == 0 && W_HALF % 1024 == 0, "");

struct Work {
    const void *bias;             // of x's type
    int tokens, n, slabs, across; // n: columns of the output; across: tiles of them
};
static_assert(sizeof(Work) == 24, "products.py packs 24 bytes");

typedef RingBarriers<STAGES> Barriers;
typedef RingPlace<STAGES> Place;

struct Tile {
    int row, column; // of the output where it begins
};

extern __shared__ __align__(1024) unsigned char shared[];

__device__ inline int pairs(const Work &work) { return (work.tokens + CLUSTER * ROWS - 1) / (CLUSTER * ROWS); }

// Bands of rows of x, and in each all of w, some rows of w after the other.
__device__ inline Tile tile_of(const Work &work, int index, int rank) {
    const int all = pairs(work), band = index / (BAND * work.across), left = index - band * BAND * work.across;
    const int high = all - band * BAND < BAND ? all - band * BAND : BAND;
    return {((band * BAND + left % high) * CLUSTER + rank) * ROWS, left / high * OUT_WIDE};
}

__device__ void load(const TensorMap &x_map, const TensorMap &w_map, const Work &work, Barriers &barriers, int rank) {
    const u32 base = shared_address(shared);
    const int count = pairs(work) * work.across, first = blockIdx.x / CLUSTER;
    auto x_of = [&](const Tile &tile, int slab, int stage) {
        load_box(base + stage * X_BYTES, x_map, shared_address(&barriers.full[stage]), slab * DEPTH, tile.row);
    };
    auto w_of = [&](const Tile &tile, int slab, int stage) {
        const u32 full = shared_address(&barriers.full[stage]);
        arrive_expecting(full, X_BYTES + W_BYTES);
        const int held = tile.column + rank * work.n; // one brings the gate's rows, the other the other half's
        load_box_to(base + AT_W + stage * W_BYTES + rank * W_HALF, w_map, full, slab * DEPTH, held, 3);
    };
    // The first weights are on their way while the kernel in front computes x.
    const int ahead = work.slabs < STAGES ? work.slabs : STAGES;
    const Tile begun = tile_of(work, first, rank);
    for (int slab = 0; slab < ahead; ++slab) w_of(begun, slab, slab);
    after_those_in_front();
    for (int slab = 0; slab < ahead; ++slab) x_of(begun, slab, slab);
    Place at;
    for (int index = first; index < count; index += gridDim.x / CLUSTER) {
        const Tile tile = tile_of(work, index, rank);
        for (int slab = 0; slab < work.slabs; ++slab, at.advance()) {
            if (index == first && slab < ahead) continue;
            wait(shared_address(&barriers.empty[at.stage]), at.parity ^ 1);
            w_of(tile, slab, at.stage);
            x_of(tile, slab, at.stage);
        }
    }
}

// silu(gate) · up of two columns. One reciprocal for both: 1/a = b · 1/(a·b); below −40 a gate is held there, where
// its value times any 16-bit number is nothing, so that the product of both stays finite.
__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
    const float g0 = low(gate), g1 = high(gate);
    const float a = 1.0f + exp2_fast(fminf(-LOG2E * g0, 60.0f));
    const float b = 1.0f + exp2_fast(fminf(-LOG2E * g1, 60.0f));
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a * b));
    return rounded_pair(g0 * (b * inverse) * low(up), g1 * (a * inverse) * high(up));
}

// A finished tile of a worker, rounded, on its way out.
struct Leaving {
    u32 held[PACKED];
    Tile tile;
};

// Where a worker's output lies in shared memory: boxes as the copy engine reads them.
struct Desk {
    u32 at;     // of this worker's boxes
    u32 row;    // of this thread, the first of its two
    int thread; // of the warpgroup
    int id;     // of the named barrier

    // Columns 8·piece + 2·(t % 4), +1: of the thread's first row, and of the one 8 below.
    __device__ void put(int piece, u32 first, u32 second) const {
        const int inside = piece % (BOX / 8);
        const u32 across = BOX == 64 ? inside ^ row % 8 : inside;
        const u32 place = at + piece / (BOX / 8) * BOX_BYTES + row * (BOX * 2) + (across << 4) + (thread % 4) * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(first) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + 8 * BOX * 2), "r"(second) : "memory");
    }

    // Before the first value of a tile: what the copy engine was to read here has been read.
    __device__ void clear() const {
        if (thread == 0) stores_read();
        meet(id, 128);
    }

    __device__ void send(const TensorMap &map, Tile tile, int n) const {
        fence_async();
        meet(id, 128);
        if (thread != 0) return;
#pragma unroll
        for (int i = 0; i < OUT_WIDE / BOX; ++i)
            if (tile.column + i * BOX < n) store_box(map, at + i * BOX_BYTES, tile.column + i * BOX, tile.row);
        stores_end();
    }
};

// Piece P of PIECES of a tile: gated, and on its way out.
template <int P>
__device__ __forceinline__ void leave(const Leaving &out, const Desk &desk, const TensorMap &map, const Work &work) {
    if (P == 0) desk.clear();
    if constexpr (P < PIECES) {
#pragma unroll
        for (int i = 2 * P; i < 2 * P + 2; ++i)
            desk.put(i, gated_pair(out.held[2 * i], out.held[PACKED / 2 + 2 * i]),
                     gated_pair(out.held[2 * i + 1], out.held[PACKED / 2 + 2 * i + 1]));
    }
    if (P == PIECES - 1) desk.send(map, out.tile, work.n);
}

// Of the tile's column ``inside``: from OUT_WIDE on they are of the other half.
__device__ inline float bias_of(const Work &work, int column, int inside) {
    const int here = column + inside % OUT_WIDE;
    if (here >= work.n) return 0.0f;
    return low(static_cast<const unsigned short *>(work.bias)[here + inside / OUT_WIDE * work.n]);
}

// Rounds a tile. held[2i], held[2i + 1]: columns 8i + 2·(t % 4), +1 of the thread's first row and of the one 8 below.
__device__ __forceinline__ void round_tile(Leaving &out, const float (&d)[SUMS], const Work &work, int thread) {
#if BIAS
#pragma unroll
    for (int i = 0; i < PACKED / 2; ++i) {
        const int inside = 8 * i + 2 * (thread % 4);
        const float a = bias_of(work, out.tile.column, inside), b = bias_of(work, out.tile.column, inside + 1);
        out.held[2 * i] = rounded_pair(d[4 * i] + a, d[4 * i + 1] + b);
        out.held[2 * i + 1] = rounded_pair(d[4 * i + 2] + a, d[4 * i + 3] + b);
    }
#else
#pragma unroll
    for (int i = 0; i < PACKED; ++i) out.held[i] = rounded_pair(d[2 * i], d[2 * i + 1]);
#endif
}

__device__ __forceinline__ void multiply(const TensorMap &out_map, const Work &work, Barriers &barriers, int worker) {
    const u32 base = shared_address(shared);
    const int thread = threadIdx.x % 128, lane = thread % 32, count = pairs(work) * work.across;
    const u32 rank = cluster_rank(), row = thread / 32 * 16 + lane / 4;
    const Desk desk{base + AT_OUT + worker * OUT_BYTES, row, thread, 1 + worker};
    float d[SUMS];
    Leaving out;
    bool waiting = false; // whether ``out`` holds a tile
    Place at;
    int last = -1; // the stage that was read last, until all products of it have ended
    auto release = [&] {
        if (last >= 0 && lane < CLUSTER) arrive_at(shared_address(&barriers.empty[last]), lane);
    };
    auto slab = [&](bool first) {
        wait(shared_address(&barriers.full[at.stage]), at.parity);
        const u32 x = base + at.stage * X_BYTES + worker * (X_BYTES / WORKERS), w = base + AT_W + at.stage * W_BYTES;
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i)
            product(d, along_rows(x + i * 32, EIGHT_ROWS), along_rows(w + i * 32, EIGHT_ROWS), !(first && i == 0));
        products_end();
        products_wait<1>(); // those of the slab before
        release();
        last = at.stage;
        at.advance();
    };
    for (int index = blockIdx.x / CLUSTER; index < count; index += gridDim.x / CLUSTER) {
        int done = 0;
#define STEP(P)                                                                                                        \
    if (done < work.slabs) slab(done == 0), ++done;                                                                    \
    if (waiting) leave<P>(out, desk, out_map, work);
        STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
#undef STEP
        for (; done < work.slabs; ++done) slab(false);
        products_wait<0>();
        changed(d);
        release();
        last = -1;
        out.tile = tile_of(work, index, rank);
        out.tile.row += worker * 64;
        round_tile(out, d, work, thread);
        waiting = true;
    }
#define STEP(P) leave<P>(out, desk, out_map, work);
    if (waiting) {
        STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
    }
#undef STEP
    if (thread == 0) stores_done();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    many_rows(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const __grid_constant__ TensorMap out_map, const __grid_constant__ Work work) {
    Barriers &barriers = *reinterpret_cast<Barriers *>(shared + AT_BARRIERS);
    const u32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        barriers.init(WORKERS * 4 * CLUSTER); // a warp, for each block
        barriers_ready();
        prefetch_map(x_map);
        prefetch_map(w_map);
        prefetch_map(out_map);
    }
    cluster_meet();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // The loader needs few registers, the others as many as there are: 40 + 2 · 232 = 3 · 168, what the block began with.
    if (group == 0) {
        keep_registers<40>();
        if (threadIdx.x == 0) load(x_map, w_map, work, barriers, rank);
        __syncwarp();
    } else {
        take_registers<232>();
        multiply(out_map, work, barriers, group - 1);
    }
    cluster_meet(); // a block that ended could not be written to, nor arrived at
}
