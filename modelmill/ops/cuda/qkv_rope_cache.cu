// Queries, keys and values of many rows (prompts): x · wᵀ (+ bias), rotated and put where attention reads them, in one
// kernel. Unrotated they never reach memory. 16 bits, sums in float32; the projection is rounded before the rotation.
//
// The products are gemm_large_m.cuh's, a tile 256 columns: two heads of 128 or four of 64. Rotating needs angles and places
// that differ from row to row, whose loads would hold the products up. So three warps of the producer's warpgroup, which
// have nothing else to do, are the epilogue_warps: consumers lay down 32 rounded rows at a time in shared memory, and these turn
// them and store them where they belong, while the next tile's products run. Whole rows, so that the heads that lie side
// by side turn by angles that are read once: shared memory and the L1 cache behind it are what products keep busiest.
//
// Macros: DIM (128, 64; of a head), BIAS (0, 1), BAND, HALF (float16 for bfloat16).
#define WIDE 256
#include "gemm_large_m.cuh"

constexpr int EPILOGUE_WARPS = 3, PART = 32;                       // warps; rows of a consumer that are finished together
constexpr u32 BOX_BYTES = PART * 128, DESK_BYTES = 4 * BOX_BYTES; // of a consumer: boxes of 64 columns
constexpr u32 BIAS_BYTES = WIDE * 2;                          // of a consumer
constexpr u32 AT_BIAS = AT_OUT + CONSUMERS * DESK_BYTES, AT_BARRIERS = AT_BIAS + CONSUMERS * BIAS_BYTES;
constexpr int EIGHTS = DIM / 16; // pieces of eight columns in half a head
static_assert(DIM == 128 || DIM == 64, "");

struct Work {
    const void *bias;            // of x's type
    u16 *q, *k, *v;              // q: [tokens, heads, DIM]; k, v: pages
    const long long *slots;      // of each token, page << page_bits | offset; below 0 its keys and values are not stored
    const float *cos, *sin;      // [tokens, DIM / 2], or null
    const float *q_scale;        // [tokens], or null
    long long page, head, token; // from one to the next in k and v, in values
    Sizes sizes;
    int heads, kv_heads, page_bits, unused;
};
static_assert(sizeof(Work) == 128, "qkv_rope_cache.py packs 128 bytes");

// Behind the ring's: "full" when a consumer has laid down its rows, "read" when they may be written over, "biased" when
// the bias of its tile is there.
struct EpilogueBarriers {
    Barriers ring;
    u64 full[CONSUMERS], read[CONSUMERS], biased[CONSUMERS];
};

struct Words {
    u32 word[4];
};

__device__ __forceinline__ Words words_at(u32 place) {
    Words got;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.word[0]), "=r"(got.word[1]), "=r"(got.word[2]), "=r"(got.word[3])
                 : "r"(place)
                 : "memory");
    return got;
}

__device__ __forceinline__ void store(u16 *target, const Words &from) {
    *reinterpret_cast<uint4 *>(target) = make_uint4(from.word[0], from.word[1], from.word[2], from.word[3]);
}

// Columns (i, i + DIM / 2) of a head as a pair turns; two of them in each word.
__device__ __forceinline__ void turn(u32 &first, u32 &second, float2 cos, float2 sin) {
    const float a0 = low(first), a1 = high(first), b0 = low(second), b1 = high(second);
    first = rounded_pair(a0 * cos.x - b0 * sin.x, a1 * cos.y - b1 * sin.y);
    second = rounded_pair(b0 * cos.x + a0 * sin.x, b1 * cos.y + a1 * sin.y);
}

__device__ __forceinline__ void scale(Words &words, float by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = rounded_pair(low(words.word[i]) * by, high(words.word[i]) * by);
}

// What a row of a tile needs besides its products: angles of eight columns and of those that they turn with, and where its
// keys and values begin in their pages, below 0 nowhere.
struct RopeInputs {
    float4 cos[2], sin[2];
    long long offset;
};

// What a head and the one behind it need: the angles of the first, which has them if either has; a place where the second
// is a key or a value.
__device__ __forceinline__ void find(RopeInputs &found, const Work &work, int row, int head, int across) {
    if (head < work.heads + work.kv_heads && work.cos != nullptr) {
        const int at = row * (DIM / 2) + across * 8;
        const float4 *cos = reinterpret_cast<const float4 *>(work.cos + at);
        const float4 *sin = reinterpret_cast<const float4 *>(work.sin + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) found.cos[i] = cos[i], found.sin[i] = sin[i];
    }
    if (head + 1 < work.heads) return;
    const int slot = static_cast<int>(work.slots[row]), page = slot >> work.page_bits;
    found.offset = slot < 0 ? -1 : page * work.page + (slot - (page << work.page_bits)) * work.token;
}

// Eight columns of a row's head and those that they turn with: read, turned and stored.
__device__ __forceinline__ void finish(const Work &work, u32 from, u32 swizzle, int row, int head, int across, const RopeInputs &by) {
    // a head of 64 lies in one box, of 128 in two
    Words a = words_at(from + (across << 4 ^ swizzle));
    Words b = words_at(DIM == 64 ? from + ((across + EIGHTS) << 4 ^ swizzle) : from + BOX_BYTES + (across << 4 ^ swizzle));
    const int key = head - work.heads, value = key - work.kv_heads;
    if (value < 0 && work.cos != nullptr) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            turn(a.word[2 * i], b.word[2 * i], {by.cos[i].x, by.cos[i].y}, {by.sin[i].x, by.sin[i].y});
            turn(a.word[2 * i + 1], b.word[2 * i + 1], {by.cos[i].z, by.cos[i].w}, {by.sin[i].z, by.sin[i].w});
        }
    }
    u16 *target;
    if (key < 0) {
        if (work.q_scale != nullptr) scale(a, work.q_scale[row]), scale(b, work.q_scale[row]);
        target = work.q + static_cast<long long>(row * work.heads + head) * DIM;
    } else {
        if (by.offset < 0 || value >= work.kv_heads) return;
        target = (value < 0 ? work.k + key * work.head : work.v + value * work.head) + by.offset;
    }
    store(target + across * 8, a);
    store(target + DIM / 2 + across * 8, b);
}

// A epilogue_warp: its share of each 32 rows that a consumer lays down, four rows at a time, eight lanes a row. A lane has the
// same columns of two heads.
__device__ void finish(const Work &work, EpilogueBarriers &epilogue_barriers, int epilogue_warp) {
    constexpr int TURNS = PART / 4;
    static_assert(EPILOGUE_WARPS <= TURNS, "each has a turn in every part, and waits for it");
    const int lane = threadIdx.x % 32, across = lane % EIGHTS, first = lane % 8 / EIGHTS * 2, below = lane / 8;
    const u32 base = shared_address(shared) + AT_OUT + first * (DIM / 64) * BOX_BYTES;
    u32 parity = 0;
    int at = epilogue_warp;      // of the turns, which go on from part to part
    pdl_wait(); // which may still read the pages, and write the angles
    each_tile(work.sizes, [&](Tile tile) {
        const int head = tile.column / DIM + first;
        for (int part = 0; part < 64 / PART; ++part, parity ^= 1) {
            for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
                for (bool laid = false; at < TURNS; at += EPILOGUE_WARPS) {
                    // rows of a warp lie side by side, those of one part 16 apart
                    const int local = at * 4 + below, inside = at % 2 * 4 + below;
                    const int row = tile.row + consumer * 64 + at / 2 * 16 + part * 8 + inside;
                    const bool real = row < work.sizes.tokens;
                    RopeInputs by;
                    if (real) find(by, work, row, head, across);
                    if (!laid) mbarrier_wait(shared_address(&epilogue_barriers.full[consumer]), parity);
                    laid = true;
                    const u32 from = base + consumer * DESK_BYTES + local * 128;
                    if (real) {
                        finish(work, from, inside << 4, row, head, across, by);
                        finish(work, from + DIM / 64 * BOX_BYTES, inside << 4, row, head + 1, across, by);
                    }
                }
                at -= TURNS;
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared_address(&epilogue_barriers.read[consumer]));
            }
        }
    });
}

// A consumer's side of it.
struct RopeCacheEpilogue {
    static constexpr int PARTS = 64 / PART, PIECES = 4; // a part: one of a thread's two rows; a piece: 64 columns
    const Work &work;
    EpilogueBarriers &epilogue_barriers;
    const int consumer, thread;
    const u32 staging, row; // row: of this thread, of those of a part
    u32 parity = 0, biased = 0;

    template <int HELD, int PIECE> __device__ __forceinline__ void piece(const OutputTile &out) {
        if (PIECE == 0) {
            mbarrier_wait(shared_address(&epilogue_barriers.read[consumer]), parity ^ 1);
            parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 place = staging + PIECE * BOX_BYTES + row * 128 + ((i ^ row % 8) << 4) + thread % 4 * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(place), "r"(out.held[2 * (8 * PIECE + i) + HELD]) : "memory");
        }
        if (PIECE == PIECES - 1) {
            __syncwarp();
            if (thread % 32 == 0) mbarrier_arrive(shared_address(&epilogue_barriers.full[consumer]));
        }
    }

    // All have met since they read the bias of the tile before. Beyond the last column it is whatever lay there.
    __device__ __forceinline__ void begun(const Tile &tile) const {
#if BIAS
        named_barrier_sync(1 + consumer, 128);
        if (thread != 0) return;
        const int left = work.sizes.n - tile.column;
        const u32 bytes = 2 * (left < WIDE ? left : WIDE), barrier = shared_address(&epilogue_barriers.biased[consumer]);
        mbarrier_arrive_expect_tx(barrier, bytes);
        bulk_load(shared_address(shared) + AT_BIAS + consumer * BIAS_BYTES, static_cast<const u16 *>(work.bias) + tile.column,
                   bytes, barrier);
#endif
    }

    __device__ __forceinline__ void round(OutputTile &out, const float (&d)[SUMS]) {
#if BIAS
        mbarrier_wait(shared_address(&epilogue_barriers.biased[consumer]), biased);
        biased ^= 1;
        const u32 *bias = reinterpret_cast<const u32 *>(shared + AT_BIAS + consumer * BIAS_BYTES) + thread % 4;
#pragma unroll
        for (int i = 0; i < PACKED / 2; ++i) {
            const u32 added = bias[4 * i];
            out.held[2 * i] = rounded_pair(d[4 * i] + low(added), d[4 * i + 1] + high(added));
            out.held[2 * i + 1] = rounded_pair(d[4 * i + 2] + low(added), d[4 * i + 3] + high(added));
        }
#else
#pragma unroll
        for (int i = 0; i < PACKED; ++i) out.held[i] = rounded_pair(d[2 * i], d[2 * i + 1]);
#endif
    }

    __device__ void end() const {}
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    qkv_rope_cache(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const __grid_constant__ Work work) {
    EpilogueBarriers &epilogue_barriers = *reinterpret_cast<EpilogueBarriers *>(shared + AT_BARRIERS);
    begin(epilogue_barriers.ring, [&] {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            mbarrier_init(shared_address(&epilogue_barriers.full[consumer]), 4); // a warp
            mbarrier_init(shared_address(&epilogue_barriers.read[consumer]), EPILOGUE_WARPS);
            mbarrier_init(shared_address(&epilogue_barriers.biased[consumer]), 1);
        }
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    });
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // Workers need no more than 216 registers: 72 + 2 · 216 = 3 · 168, what the block began with.
    if (group == 0) {
        setmaxnreg_dec<72>();
        if (warp > 0) finish(work, epilogue_barriers, warp - 1);
        if (threadIdx.x == 0) load(x_map, w_map, work.sizes, epilogue_barriers.ring);
        __syncwarp();
    } else {
        setmaxnreg_inc<216>();
        const int consumer = group - 1, thread = threadIdx.x % 128;
        const u32 row = thread / 32 * 8 + thread % 32 / 4;
        RopeCacheEpilogue exit{work, epilogue_barriers, consumer, thread, shared_address(shared) + AT_OUT + consumer * DESK_BYTES, row};
        Multiply<RopeCacheEpilogue>{exit, work.sizes, epilogue_barriers.ring, consumer}.run();
    }
    cluster_sync_relaxed(); // a block that ended could not be written to, nor arrived at
}
