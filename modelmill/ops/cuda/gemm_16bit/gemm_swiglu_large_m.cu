// Fused SwiGLU GEMM for many rows (prefill); gate and up are never written to memory.
//
// Computes: out[M, N] = silu(gate) · up with gate = x[M, K] · w[0:N, K]ᵀ (+ bias), up the same with
//     w[N:2N, K]
// Dtypes: x, w and out bfloat16 or float16; float32 accumulators
// Layout: row-major, rows 16-byte aligned
// Range: M ≥ 512 whose tiles fill the SMs (gemm.MIN_TILE_EFFICIENCY); N a multiple of 8
// Technique: TMA with multicast, mbarrier pipeline, wgmma, cluster of 2, setmaxnreg, PDL
// Ops: linear_swiglu (launched by gemm.py)
//
// Main loop: gemm_large_m.cuh (TMA multicast, mbarrier pipeline, wgmma, cluster of 2, PDL). Half of
// a tile's rows of w are gate rows, the other half the matching up rows, so that a thread holds
// both values of an output. The epilogue stages the result in shared memory and stores it by TMA
// while the next tile's wgmmas run.
//
// Macros: BLOCK_N (256, 224), BIAS (0, 1), BAND, HALF (float16 instead of bfloat16).
#include "gemm_16bit/gemm_large_m.cuh"

constexpr int OUT_BLOCK_N = HALF_BLOCK_N;
// Box of the output's tensor map: 64 rows by STORE_BOX columns; swizzled only if 64 columns wide.
constexpr int STORE_BOX = OUT_BLOCK_N % 64 ? 16 : 64;
// OUT_BYTES: of a consumer
constexpr u32 STORE_BOX_BYTES = 64 * STORE_BOX * 2, OUT_BYTES = 64 * OUT_BLOCK_N * 2;
constexpr u32 AT_BARRIERS = AT_OUT + CONSUMERS * OUT_BYTES;
static_assert(OUT_BLOCK_N % STORE_BOX == 0, "");

struct Work {
    const void* bias;  // of x's type
    Sizes sizes;
};
static_assert(sizeof(Work) == 32, "gemm.py packs 32 bytes");

// silu(gate) · up of two columns with one reciprocal: 1/a = b · 1/(a·b). The exponent is clamped
// (gates below about −40, whose silu is 0 in 16 bits) so that a·b stays finite.
__device__ __forceinline__ u32 silu_mul_pair(u32 gate, u32 up) {
    const float g0 = low(gate), g1 = high(gate);
    const float a = 1.0f + exp2_fast(fminf(-LOG2E * g0, 60.0f));
    const float b = 1.0f + exp2_fast(fminf(-LOG2E * g1, 60.0f));
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a * b));
    return rounded_pair(g0 * (b * inverse) * low(up), g1 * (a * inverse) * high(up));
}

// A consumer's output in shared memory, in the layout of the TMA store boxes.
struct OutputStaging {
    u32 at;      // address of this consumer's boxes
    u32 row;     // first of this thread's two rows
    int thread;  // index in the warpgroup
    int id;      // of the named barrier

    // Writes columns 8·piece + 2·(t % 4), + 1 of the thread's first row and of that + 8.
    __device__ void write(int piece, u32 first, u32 second) const {
        const int inside = piece % (STORE_BOX / 8);
        const u32 swizzled_chunk = STORE_BOX == 64 ? inside ^ row % 8 : inside;
        const u32 place = at + piece / (STORE_BOX / 8) * STORE_BOX_BYTES + row * (STORE_BOX * 2) +
                          (swizzled_chunk << 4) + (thread % 4) * 4;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(first) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + 8 * STORE_BOX * 2), "r"(second)
                     : "memory");
    }

    // Waits until TMA has read the previous tile from the staging buffer.
    __device__ void acquire() const {
        if (thread == 0) tma_store_wait_read();
        named_barrier_sync(id, 128);
    }

    __device__ void store_tile(const TensorMap& map, Tile tile, int n) const {
        fence_proxy_async();
        named_barrier_sync(id, 128);
        if (thread != 0) return;
#pragma unroll
        for (int i = 0; i < OUT_BLOCK_N / STORE_BOX; ++i)
            if (tile.column + i * STORE_BOX < n)
                tma_store(map, at + i * STORE_BOX_BYTES, tile.column + i * STORE_BOX, tile.row);
        tma_store_commit();
    }
};

// Bias of column `inside` of the tile; columns from OUT_BLOCK_N on belong to the up half.
__device__ inline float bias_of(const Work& work, int column, int inside) {
    const int here = column + inside % OUT_BLOCK_N;
    if (here >= work.sizes.n) return 0.0f;
    return low(
        static_cast<const unsigned short*>(work.bias)[here + inside / OUT_BLOCK_N * work.sizes.n]);
}

struct SwigluEpilogue {
    static constexpr int PARTS = 1, SLICES = OUT_BLOCK_N / 16;  // a slice: 16 columns
    const TensorMap& map;
    const Work& work;
    const OutputStaging staging;

    __device__ void on_tile_start(const Tile&) const {}

    template <int PART, int SLICE>
    __device__ __forceinline__ void store_slice(const OutputTile& out) const {
        if (SLICE == 0) staging.acquire();
#pragma unroll
        for (int i = 2 * SLICE; i < 2 * SLICE + 2; ++i)
            staging.write(i, silu_mul_pair(out.packed[2 * i], out.packed[PACKED / 2 + 2 * i]),
                          silu_mul_pair(out.packed[2 * i + 1], out.packed[PACKED / 2 + 2 * i + 1]));
        if (SLICE == SLICES - 1) staging.store_tile(map, out.tile, work.sizes.n);
    }

    __device__ __forceinline__ void convert(OutputTile& out, const float (&d)[SUMS]) const {
#if BIAS
#    pragma unroll
        for (int i = 0; i < PACKED / 2; ++i) {
            const int inside = 8 * i + 2 * (staging.thread % 4);
            const float a = bias_of(work, out.tile.column, inside),
                        b = bias_of(work, out.tile.column, inside + 1);
            out.packed[2 * i] = rounded_pair(d[4 * i] + a, d[4 * i + 1] + b);
            out.packed[2 * i + 1] = rounded_pair(d[4 * i + 2] + a, d[4 * i + 3] + b);
        }
#else
#    pragma unroll
        for (int i = 0; i < PACKED; ++i) out.packed[i] = rounded_pair(d[2 * i], d[2 * i + 1]);
#endif
    }

    __device__ void finish() const {
        if (staging.thread == 0) tma_store_wait();
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    gemm_swiglu_large_m(const __grid_constant__ TensorMap x_map,
                        const __grid_constant__ TensorMap w_map,
                        const __grid_constant__ TensorMap out_map,
                        const __grid_constant__ Work work) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + AT_BARRIERS);
    init_block(barriers, [&] {
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
        prefetch_tensor_map(out_map);
    });
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // Registers move from the producer to the consumers: 40 + 2 · 232 = 3 · 168, the launch's
    // total.
    if (group == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) load(x_map, w_map, work.sizes, barriers);
        __syncwarp();
    } else {
        setmaxnreg_inc<232>();
        const int consumer = group - 1, thread = threadIdx.x % 128;
        const u32 row = thread / 32 * 16 + thread % 32 / 4;
        SwigluEpilogue epilogue{
            out_map,
            work,
            {shared_address(shared) + AT_OUT + consumer * OUT_BYTES, row, thread, 1 + consumer}};
        Multiply<SwigluEpilogue>{epilogue, work.sizes, barriers, consumer}.run();
    }
    cluster_sync_relaxed();  // no block may exit while multicasts or remote arrivals target it
}
