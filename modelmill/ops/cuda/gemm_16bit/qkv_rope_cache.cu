// Fused QKV projection, RoPE and KV-cache write for many rows (prefill).
//
// Computes: x[M, K] · w[N, K]ᵀ (+ bias) with N = (heads + 2 · kv_heads) · DIM; q rotated to [M,
//     heads, DIM], k (rotated) and v to their cache pages
// Dtypes: x, w, q and KV pages bfloat16 or float16; float32 accumulators and angles; the projection
//     is rounded before the rotation
// Layout: x and w row-major, rows 16-byte aligned; pages [pages, kv_heads, PAGE, DIM]; int64 slots
// Range: M ≥ 512 whose tiles fill the SMs (MIN_TILE_EFFICIENCY); DIM 64 or 128, no q/k norms
// Technique: TMA with multicast, mbarrier pipeline, wgmma, cluster of 2, epilogue warps,
//     setmaxnreg, PDL
// Ops: qkv_rope_cache (launched by qkv_rope_cache.py)
//
// Main loop: gemm_large_m.cuh with tiles of 256 columns: two heads of 128 or four of 64 (TMA
// multicast, mbarrier pipeline, wgmma, cluster of 2, PDL). The rotation needs angles and slots per
// row, whose loads would delay wgmma. So the three idle warps of the producer warpgroup are
// epilogue warps: consumers write 32 rounded rows at a time to shared memory; the epilogue warps
// rotate and store them while the next tile's wgmmas run. A lane processes the same columns of two
// neighbouring heads, so that angles are read once.
//
// Macros: DIM (128, 64; head dimension), BIAS (0, 1), BAND, HALF (float16 instead of bfloat16).
#define BLOCK_N 256
#include "gemm_16bit/gemm_large_m.cuh"

// warps; rows of a consumer per handover
constexpr int EPILOGUE_WARPS = 3, PART = 32;
// of a consumer: tiles of 64 columns
constexpr u32 BOX_BYTES = PART * 128, STAGING_BYTES = 4 * BOX_BYTES;
constexpr u32 BIAS_BYTES = BLOCK_N * 2;  // of a consumer
constexpr u32 AT_BIAS = AT_OUT + CONSUMERS * STAGING_BYTES,
              AT_BARRIERS = AT_BIAS + CONSUMERS * BIAS_BYTES;
constexpr int CHUNKS = DIM / 16;  // chunks of eight columns in half a head
static_assert(DIM == 128 || DIM == 64, "");

struct Work {
    const void* bias;  // of x's type
    u16 *q, *k, *v;    // q: [tokens, heads, DIM]; k, v: pages
    // per token: page << page_bits | offset; negative: keys and values are not stored
    const long long* slots;
    const float *cos, *sin;       // [tokens, DIM / 2], or null
    const float* q_scale;         // [tokens], or null
    long long page, head, token;  // strides of k and v in elements
    Sizes sizes;
    int heads, kv_heads, page_bits, unused;
};
static_assert(sizeof(Work) == 128, "qkv_rope_cache.py packs 128 bytes");

// Beside the pipeline's barriers: full (a consumer has written its rows), empty (they may be
// overwritten), bias_full (the tile's bias has landed).
struct EpilogueBarriers {
    Barriers ring;
    u64 full[CONSUMERS], empty[CONSUMERS], bias_full[CONSUMERS];
};

struct Words {
    u32 word[4];
};

__device__ __forceinline__ Words load_words(u32 place) {
    Words loaded;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.word[0]), "=r"(loaded.word[1]), "=r"(loaded.word[2]),
                   "=r"(loaded.word[3])
                 : "r"(place)
                 : "memory");
    return loaded;
}

__device__ __forceinline__ void store(u16* target, const Words& from) {
    *reinterpret_cast<uint4*>(target) =
        make_uint4(from.word[0], from.word[1], from.word[2], from.word[3]);
}

// Rotates the pairs of columns (i, i + DIM / 2) of a head; two columns in each word.
__device__ __forceinline__ void rotate(u32& first, u32& second, float2 cos, float2 sin) {
    const float a0 = low(first), a1 = high(first), b0 = low(second), b1 = high(second);
    first = rounded_pair(a0 * cos.x - b0 * sin.x, a1 * cos.y - b1 * sin.y);
    second = rounded_pair(b0 * cos.x + a0 * sin.x, b1 * cos.y + a1 * sin.y);
}

__device__ __forceinline__ void scale(Words& words, float by) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words.word[i] = rounded_pair(low(words.word[i]) * by, high(words.word[i]) * by);
}

// Epilogue operands of a row: cos and sin of eight column pairs, and the element offset of its keys
// and values in the cache (negative: not stored).
struct RopeInputs {
    float4 cos[2], sin[2];
    long long offset;
};

// Loads the operands of `head` and `head` + 1: angles if the first is rotated, the cache offset if
// the second is a key or value head.
__device__ __forceinline__ void load_rope_inputs(RopeInputs& inputs, const Work& work, int row,
                                                 int head, int chunk) {
    if (head < work.heads + work.kv_heads && work.cos != nullptr) {
        const int at = row * (DIM / 2) + chunk * 8;
        const float4* cos = reinterpret_cast<const float4*>(work.cos + at);
        const float4* sin = reinterpret_cast<const float4*>(work.sin + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) inputs.cos[i] = cos[i], inputs.sin[i] = sin[i];
    }
    if (head + 1 < work.heads) return;
    const int slot = static_cast<int>(work.slots[row]), page = slot >> work.page_bits;
    inputs.offset =
        slot < 0 ? -1 : page * work.page + (slot - (page << work.page_bits)) * work.token;
}

// Loads, rotates and stores eight column pairs of a row's head.
__device__ __forceinline__ void finish(const Work& work, u32 from, u32 swizzle, int row, int head,
                                       int chunk, const RopeInputs& by) {
    // a head of 64 is in one tile of 64 columns, of 128 in two
    Words a = load_words(from + (chunk << 4 ^ swizzle));
    Words b = load_words(DIM == 64 ? from + ((chunk + CHUNKS) << 4 ^ swizzle)
                                   : from + BOX_BYTES + (chunk << 4 ^ swizzle));
    const int key = head - work.heads, value = key - work.kv_heads;
    if (value < 0 && work.cos != nullptr) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rotate(a.word[2 * i], b.word[2 * i], {by.cos[i].x, by.cos[i].y},
                   {by.sin[i].x, by.sin[i].y});
            rotate(a.word[2 * i + 1], b.word[2 * i + 1], {by.cos[i].z, by.cos[i].w},
                   {by.sin[i].z, by.sin[i].w});
        }
    }
    u16* target;
    if (key < 0) {
        if (work.q_scale != nullptr) scale(a, work.q_scale[row]), scale(b, work.q_scale[row]);
        target = work.q + static_cast<long long>(row * work.heads + head) * DIM;
    } else {
        if (by.offset < 0 || value >= work.kv_heads) return;
        target = (value < 0 ? work.k + key * work.head : work.v + value * work.head) + by.offset;
    }
    store(target + chunk * 8, a);
    store(target + DIM / 2 + chunk * 8, b);
}

// Loop of an epilogue warp over its share of each 32 rows, four rows at a time with eight lanes per
// row. A lane has the same columns of two heads.
__device__ void finish(const Work& work, EpilogueBarriers& epilogue_barriers, int epilogue_warp) {
    constexpr int ROW_GROUPS = PART / 4;
    static_assert(EPILOGUE_WARPS <= ROW_GROUPS,
                  "each has a turn in every part, and has_output for it");
    const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, first = lane % 8 / CHUNKS * 2,
              below = lane / 8;
    const u32 base = shared_address(shared) + AT_OUT + first * (DIM / 64) * BOX_BYTES;
    u32 parity = 0;
    int at = epilogue_warp;  // index of the group of four rows, carried across parts
    pdl_wait();              // the previous kernel may read the pages and write the angles
    each_tile(work.sizes, [&](Tile tile) {
        const int head = tile.column / DIM + first;
        for (int part = 0; part < 64 / PART; ++part, parity ^= 1) {
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                for (bool ready = false; at < ROW_GROUPS; at += EPILOGUE_WARPS) {
                    // rows of a warp are adjacent; those of one part are 16 apart
                    const int local = at * 4 + below, inside = at % 2 * 4 + below;
                    const int row = tile.row + consumer * 64 + at / 2 * 16 + part * 8 + inside;
                    const bool valid = row < work.sizes.tokens;
                    RopeInputs by;
                    if (valid) load_rope_inputs(by, work, row, head, chunk);
                    if (!ready)
                        mbarrier_wait(shared_address(&epilogue_barriers.full[consumer]), parity);
                    ready = true;
                    const u32 from = base + consumer * STAGING_BYTES + local * 128;
                    if (valid) {
                        finish(work, from, inside << 4, row, head, chunk, by);
                        finish(work, from + DIM / 64 * BOX_BYTES, inside << 4, row, head + 1, chunk,
                               by);
                    }
                }
                at -= ROW_GROUPS;
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared_address(&epilogue_barriers.empty[consumer]));
            }
        }
    });
}

// The consumers' part of the epilogue.
struct RopeCacheEpilogue {
    // a part: one of a thread's two rows; a slice: 64 columns
    static constexpr int PARTS = 64 / PART, SLICES = 4;
    const Work& work;
    EpilogueBarriers& epilogue_barriers;
    const int consumer, thread;
    const u32 staging, row;  // row: this thread's row within a part
    u32 parity = 0, bias_parity = 0;

    template <int ROW, int SLICE>
    __device__ __forceinline__ void store_slice(const OutputTile& out) {
        if (SLICE == 0) {
            mbarrier_wait(shared_address(&epilogue_barriers.empty[consumer]), parity ^ 1);
            parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 place =
                staging + SLICE * BOX_BYTES + row * 128 + ((i ^ row % 8) << 4) + thread % 4 * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(place),
                         "r"(out.packed[2 * (8 * SLICE + i) + ROW])
                         : "memory");
        }
        if (SLICE == SLICES - 1) {
            __syncwarp();
            if (thread % 32 == 0)
                mbarrier_arrive(shared_address(&epilogue_barriers.full[consumer]));
        }
    }

    // The barrier orders the reads of the previous tile's bias. Past the last column the data is
    // undefined.
    __device__ __forceinline__ void on_tile_start(const Tile& tile) const {
#if BIAS
        named_barrier_sync(1 + consumer, 128);
        if (thread != 0) return;
        const int left = work.sizes.n - tile.column;
        const u32 bytes = 2 * (left < BLOCK_N ? left : BLOCK_N),
                  barrier = shared_address(&epilogue_barriers.bias_full[consumer]);
        mbarrier_arrive_expect_tx(barrier, bytes);
        bulk_load(shared_address(shared) + AT_BIAS + consumer * BIAS_BYTES,
                  static_cast<const u16*>(work.bias) + tile.column, bytes, barrier);
#endif
    }

    __device__ __forceinline__ void convert(OutputTile& out, const float (&d)[SUMS]) {
#if BIAS
        mbarrier_wait(shared_address(&epilogue_barriers.bias_full[consumer]), bias_parity);
        bias_parity ^= 1;
        const u32* bias =
            reinterpret_cast<const u32*>(shared + AT_BIAS + consumer * BIAS_BYTES) + thread % 4;
#    pragma unroll
        for (int i = 0; i < PACKED / 2; ++i) {
            const u32 added = bias[4 * i];
            out.packed[2 * i] = rounded_pair(d[4 * i] + low(added), d[4 * i + 1] + high(added));
            out.packed[2 * i + 1] =
                rounded_pair(d[4 * i + 2] + low(added), d[4 * i + 3] + high(added));
        }
#else
#    pragma unroll
        for (int i = 0; i < PACKED; ++i) out.packed[i] = rounded_pair(d[2 * i], d[2 * i + 1]);
#endif
    }

    __device__ void finish() const {}
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    qkv_rope_cache(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                   const __grid_constant__ Work work) {
    EpilogueBarriers& epilogue_barriers =
        *reinterpret_cast<EpilogueBarriers*>(shared + AT_BARRIERS);
    init_block(epilogue_barriers.ring, [&] {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            // one arrival per warp
            mbarrier_init(shared_address(&epilogue_barriers.full[consumer]), 4);
            mbarrier_init(shared_address(&epilogue_barriers.empty[consumer]), EPILOGUE_WARPS);
            mbarrier_init(shared_address(&epilogue_barriers.bias_full[consumer]), 1);
        }
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    });
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0),
              warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // Consumers need at most 216 registers: 72 + 2 · 216 = 3 · 168, the launch's total.
    if (group == 0) {
        setmaxnreg_dec<72>();
        if (warp > 0) finish(work, epilogue_barriers, warp - 1);
        if (threadIdx.x == 0) load(x_map, w_map, work.sizes, epilogue_barriers.ring);
        __syncwarp();
    } else {
        setmaxnreg_inc<216>();
        const int consumer = group - 1, thread = threadIdx.x % 128;
        const u32 row = thread / 32 * 8 + thread % 32 / 4;
        RopeCacheEpilogue epilogue{work,
                                   epilogue_barriers,
                                   consumer,
                                   thread,
                                   shared_address(shared) + AT_OUT + consumer * STAGING_BYTES,
                                   row};
        Multiply<RopeCacheEpilogue>{epilogue, work.sizes, epilogue_barriers.ring, consumer}.run();
    }
    cluster_sync_relaxed();  // no block may exit while multicasts or remote arrivals target it
}
