// Gated products of many rows (prompts): out[t, n] = silu(gate) · up, gate[t, n] = sum_k x[t, k] · w[n, k] (+ bias[n]), up
// the same with the other half of w's rows; neither reaches memory. 16 bits, sums in float32.
//
// The products are gemm_large_m.cuh's. Half of a tile's rows of w are of the gate and the others the same of the other half,
// so that a thread holds both values of an output. The gate is computed and stored while the next tile's products run.
//
// Macros: WIDE (256, 224), BIAS (0, 1), BAND, HALF (float16 for bfloat16).
#include "gemm_large_m.cuh"

constexpr int OUT_WIDE = HALF_WIDE;
// The output leaves in boxes of 64 rows and BOX columns; those of 64 columns are swizzled, narrower ones are not.
constexpr int BOX = OUT_WIDE % 64 ? 16 : 64;
constexpr u32 BOX_BYTES = 64 * BOX * 2, OUT_BYTES = 64 * OUT_WIDE * 2; // OUT_BYTES: of a consumer
constexpr u32 AT_BARRIERS = AT_OUT + CONSUMERS * OUT_BYTES;
static_assert(OUT_WIDE % BOX == 0, "");

struct Work {
    const void *bias; // of x's type
    Sizes sizes;
};
static_assert(sizeof(Work) == 32, "gemm.py packs 32 bytes");

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

// Where a consumer's output lies in shared memory: boxes as the copy engine reads them.
struct OutputStaging {
    u32 at;     // of this consumer's boxes
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
        if (thread == 0) tma_store_wait_read();
        named_barrier_sync(id, 128);
    }

    __device__ void send(const TensorMap &map, Tile tile, int n) const {
        fence_proxy_async();
        named_barrier_sync(id, 128);
        if (thread != 0) return;
#pragma unroll
        for (int i = 0; i < OUT_WIDE / BOX; ++i)
            if (tile.column + i * BOX < n) tma_store(map, at + i * BOX_BYTES, tile.column + i * BOX, tile.row);
        tma_store_commit();
    }
};

// Of the tile's column ``inside``: from OUT_WIDE on they are of the other half.
__device__ inline float bias_of(const Work &work, int column, int inside) {
    const int here = column + inside % OUT_WIDE;
    if (here >= work.sizes.n) return 0.0f;
    return low(static_cast<const unsigned short *>(work.bias)[here + inside / OUT_WIDE * work.sizes.n]);
}

struct SwigluEpilogue {
    static constexpr int PARTS = 1, PIECES = OUT_WIDE / 16; // a piece: 16 columns
    const TensorMap &map;
    const Work &work;
    const OutputStaging staging;

    __device__ void begun(const Tile &) const {}

    template <int PART, int PIECE> __device__ __forceinline__ void piece(const OutputTile &out) const {
        if (PIECE == 0) staging.clear();
#pragma unroll
        for (int i = 2 * PIECE; i < 2 * PIECE + 2; ++i)
            staging.put(i, gated_pair(out.held[2 * i], out.held[PACKED / 2 + 2 * i]),
                     gated_pair(out.held[2 * i + 1], out.held[PACKED / 2 + 2 * i + 1]));
        if (PIECE == PIECES - 1) staging.send(map, out.tile, work.sizes.n);
    }

    __device__ __forceinline__ void round(OutputTile &out, const float (&d)[SUMS]) const {
#if BIAS
#pragma unroll
        for (int i = 0; i < PACKED / 2; ++i) {
            const int inside = 8 * i + 2 * (staging.thread % 4);
            const float a = bias_of(work, out.tile.column, inside), b = bias_of(work, out.tile.column, inside + 1);
            out.held[2 * i] = rounded_pair(d[4 * i] + a, d[4 * i + 1] + b);
            out.held[2 * i + 1] = rounded_pair(d[4 * i + 2] + a, d[4 * i + 3] + b);
        }
#else
#pragma unroll
        for (int i = 0; i < PACKED; ++i) out.held[i] = rounded_pair(d[2 * i], d[2 * i + 1]);
#endif
    }

    __device__ void end() const {
        if (staging.thread == 0) tma_store_wait();
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_swiglu_large_m(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const __grid_constant__ TensorMap out_map, const __grid_constant__ Work work) {
    Barriers &barriers = *reinterpret_cast<Barriers *>(shared + AT_BARRIERS);
    begin(barriers, [&] {
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
        prefetch_tensor_map(out_map);
    });
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // The producer needs few registers, the others as many as there are: 40 + 2 · 232 = 3 · 168, what the block began with.
    if (group == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) load(x_map, w_map, work.sizes, barriers);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        const int consumer = group - 1, thread = threadIdx.x % 128;
        const u32 row = thread / 32 * 16 + thread % 32 / 4;
        SwigluEpilogue gate{out_map, work, {shared_address(shared) + AT_OUT + consumer * OUT_BYTES, row, thread, 1 + consumer}};
        Multiply<SwigluEpilogue>{gate, work.sizes, barriers, consumer}.run();
    }
    cluster_sync_relaxed(); // a block that ended could not be written to, nor arrived at
}
