// Weight-only int4/int8 GEMM with weights and x through shared memory.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N]); with GATED SwiGLU of the two
//     halves of N
// Dtypes: x and out bfloat16 or float16; weights int8 or packed int4; float16 group scales and
//     offsets (float32 scales of int8 weights without offsets); float32 accumulators
// Layout: row-major; packed codes as in ops/int4_linear.py; scales and offsets [N, groups]
// Range: 17 ≤ M ≤ 128 (fewer where wq_gemm_small_m.cu does not apply: from 9, from 2 where N · K ≥
//     2^25 or groups are smaller than 128); N a multiple of 8 (GATED: of 16), K of 32
// Technique: TMA, mbarrier pipeline, wgmma with A in registers, pingpong warpgroups, split-K over a
//     thread-block cluster (DSMEM), setmaxnreg, PDL
// Ops: int4_linear, int4_linear_swiglu, int8_linear, int8_linear_swiglu, int8_group_linear
//     (launched by wq_gemm_pipelined.py)
//
// Weights and x both go through shared memory, so that consumer warps have no pending global loads
// when they issue wgmma. One producer thread keeps STAGES K tiles of 128 columns of weights and x
// in flight; the first weights are loaded before griddepcontrol.wait (PDL). Two consumer warpgroups
// own 64 weight rows each, dequantized to the A operand of wgmma in registers. A thread uses the
// bytes of two rows as loaded: K may be permuted if x uses the same permutation. The kernel
// wq_permute_and_sum, launched before, permutes x accordingly and computes the group sums of x.
//
// Up to 64 rows of x, a consumer dequantizes the next K tile while the wgmmas of one run; the sums
// of a group are scaled and added once its wgmmas have completed, while those of the next group run
// into other registers. Sums of 128 rows leave no room for these, so that the two consumers take
// turns there (pingpong): one adds and dequantizes while the other's wgmmas run.
//
// Dequantization: a 4-bit code c is combined with the exponent of 128 and reads as 128 + c
// (bfloat16); in float16 c alone is the subnormal c / 2^24, exact in wgmma. int8: dequant_int8.cuh.
// out = sum over groups of scale · acc + base · sum(x), base = offset − 128 · scale or the offset.
// The second term is a wgmma with groups as K: base and sums are split in three bfloat16 each
// (bf16x3), six of whose nine products are significant.
//
// SPLIT blocks of a cluster share K (split-K) and reduce through DSMEM in rank order.
//
// Macros: BITS (of a weight), GROUPS (groups per K tile: 1, 2, 4), BLOCK_M (rows of x, padded: 16,
// 32, 64, 128), SPLIT, STAGES, GATED (as weight_only.cuh), OFFSET (0: symmetric), SCALE_FP32
// (scales are float32), HALF.
#include "weight_only_gemm/wq_gemm_tile.cuh"
#include "weight_only_gemm/code_base.cuh"

constexpr int COLUMNS = 128, CHUNK = 16;
// Groups whose wgmmas a consumer has in flight.
constexpr int IN_FLIGHT = BLOCK_M <= 64 ? 2 : 1;
constexpr int TURN = 2;  // first of two named barriers, one per consumer
// A K tile of the weight is stored in parts of a few columns each: a warp reads one part
// contiguously.
constexpr int ROW_BYTES = COLUMNS * BITS / 8, PARTS = BITS == 8 && GROUPS == 1 ? 2 : GROUPS,
              PART_BYTES = ROW_BYTES / PARTS;
constexpr u32 PART_TILE_BYTES = ROWS * PART_BYTES, W_BYTES = PARTS * PART_TILE_BYTES;
// SLAB_BYTES: 64 columns of x
constexpr u32 SLAB_BYTES = BLOCK_M * 128, STAGE_BYTES = W_BYTES + 2 * SLAB_BYTES;
// words of a thread per row of a K tile; per part
constexpr int WORDS = ROW_BYTES / 16, WORDS_PER_PART = WORDS / PARTS;
constexpr int MMAS_PER_GROUP = 8 / GROUPS;  // wgmmas per group
constexpr bool USES_SUMS = BITS == 4 || OFFSET;
static_assert(!SCALE_FP32 || !USES_SUMS, "scale and offset are packed in one word");
static_assert(STAGES * STAGE_BYTES >= RESULT_BYTES,
              "the results must fit in the pipeline's memory");

// Packs two bfloat16, whatever the type of x is.
__device__ inline u32 bf16_pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// D += A · B in bfloat16, whatever the type of x is, with A in registers (as in wgmma.cuh).
#define WGMMA_BF16(COUNT, N, A, B)                                                                 \
    __device__ inline void wgmma_bf16(float (&d)[COUNT], const u32(&a)[4], u64 b) {                \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGS_##COUNT     \
                     "}, {" A "}, %" #B ", 1, 1, 1, 0;"                                            \
                     : ACC_##COUNT(d, 0)                                                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
    }
WGMMA_BF16(8, 16, "%8, %9, %10, %11", 12)
WGMMA_BF16(16, 32, "%16, %17, %18, %19", 20)
WGMMA_BF16(32, 64, "%32, %33, %34, %35", 36)
WGMMA_BF16(64, 128, "%64, %65, %66, %67", 68)
#undef WGMMA_BF16

// A block's range of K tiles, the groups that begin in it (whose sums it multiplies), and these
// groups in chunks of 16.
struct Range {
    int begin, end, group_begin, group_end, chunk, chunks;
};

__device__ inline Range range_of(const Work& w, int rank) {
    const int each = (w.k_tiles + SPLIT - 1) / SPLIT, up = (1 << w.shift) - 1;
    Range r;
    r.begin = min(rank * each, w.k_tiles), r.end = min((rank + 1) * each, w.k_tiles);
    r.group_begin = GROUPS > 1 ? min(r.begin * GROUPS, w.groups) : (r.begin + up) >> w.shift;
    r.group_end = GROUPS > 1 ? min(r.end * GROUPS, w.groups) : (r.end + up) >> w.shift;
    r.chunk = r.group_begin / CHUNK, r.chunks = USES_SUMS && r.group_end > r.group_begin
                                                    ? (r.group_end - 1) / CHUNK - r.chunk + 1
                                                    : 0;
    return r;
}

struct Producer {
    const TensorMap &x_map, &w_map;
    const Work& work;
    Barriers& barriers;
    u32 base;
    Tile tile;

    __device__ u32 full(int stage) const { return shared_address(&barriers.full[stage]); }

    __device__ void load_w(int stage, int k_tile) const {
        mbarrier_arrive_expect_tx(full(stage), STAGE_BYTES);
        load_weight_parts<PARTS, PART_BYTES>(w_map, base + stage * STAGE_BYTES, full(stage),
                                             k_tile * ROW_BYTES, tile.index, work.rows);
    }

    __device__ void load_x(int stage, int k_tile) const {
        const u32 target = base + stage * STAGE_BYTES + W_BYTES;
        tma_load(target, x_map, full(stage), k_tile * COLUMNS, tile.token);
        tma_load(target + SLAB_BYTES, x_map, full(stage), k_tile * COLUMNS + 64, tile.token);
    }

    __device__ void run(Range range) const {
        const int ahead = min(range.end - range.begin, STAGES);
        for (int i = 0; i < ahead; ++i) load_w(i, range.begin + i);
        pdl_wait();
        for (int i = 0; i < ahead; ++i) load_x(i, range.begin + i);
        PipelineState<STAGES> state;
        for (int i = 0; i < ahead; ++i) state.advance();
        for (int k_tile = range.begin + ahead; k_tile < range.end; ++k_tile, state.advance()) {
            mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);
            load_w(state.stage, k_tile);
            load_x(state.stage, k_tile);
        }
        for (int chunk = 0; chunk < range.chunks; ++chunk, state.advance()) {
            mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);
            mbarrier_arrive_expect_tx(full(state.stage), SLAB_BYTES);
            tma_load(base + state.stage * STAGE_BYTES + W_BYTES, x_map, full(state.stage),
                     work.k_tiles * COLUMNS + (range.chunk + chunk) * 64, tile.token);
        }
    }
};

// Reads a thread's words of a row of a K tile, from `at` on.
__device__ inline void read(u32 (&words)[WORDS], const unsigned char* at) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        u32* to = words + i * WORDS_PER_PART;
        if (WORDS_PER_PART == 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(at + i * PART_TILE_BYTES);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else if (WORDS_PER_PART == 1) {
            to[0] = *reinterpret_cast<const u32*>(at + i * PART_TILE_BYTES);
        } else {
            const uint2 two = *reinterpret_cast<const uint2*>(at + i * PART_TILE_BYTES);
            to[0] = two.x, to[1] = two.y;
        }
    }
}

// A fragments of a K tile's eight wgmmas, from two weight rows.
struct AOperand {
    u32 a[8][4];

    __device__ void load(const unsigned char* low_at, const unsigned char* high_at) {
        u32 low[WORDS], high[WORDS];
        read(low, low_at);
        read(high, high_at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 l = low[i * WORDS / 8], h = high[i * WORDS / 8];
#if BITS == 4
            const int by = i % 2 * 4;
            a[i][0] = code_pair(l, by), a[i][1] = code_pair(h, by), a[i][2] = code_pair(l, by + 8),
            a[i][3] = code_pair(h, by + 8);
#else
            a[i][0] = dequant_int8_pair(l), a[i][1] = dequant_int8_pair(h);
            a[i][2] = dequant_int8_pair(l >> 8), a[i][3] = dequant_int8_pair(h >> 8);
#endif
        }
    }

    __device__ void fence() {
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_fence_operand(a[i]);
    }

    // Issues the wgmmas of one group of the K tile.
    __device__ void issue(float (&part)[BLOCK_M / 2], u64 x, int group) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < MMAS_PER_GROUP; ++j) {
            const int i = group * MMAS_PER_GROUP + j;
            // descriptor addresses count 16 bytes
            const u64 right = x + (i / 4 * SLAB_BYTES + i % 4 * 32) / 16;
            wgmma(part, a[i][0], a[i][1], a[i][2], a[i][3], right, j > 0);
        }
        wgmma_commit();
    }
};

struct Pair {
    ScaleOffset low, high;  // of this thread's two rows
};

__device__ inline void flush(float (&total)[BLOCK_M / 2], const float (&part)[BLOCK_M / 2],
                             Pair scales) {
    const float low = scale_of(scales.low) * CODE_SCALE, high = scale_of(scales.high) * CODE_SCALE;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; ++i)
        total[i] = fmaf(i % 4 < 2 ? low : high, part[i], total[i]);
}

__device__ inline float base_of(ScaleOffset both) {
    const float scale = scale_of(both);
#if OFFSET
    return half_to_float(both >> 16) - CODE_BASE * scale;
#else
    return -8.0f * scale - CODE_BASE * scale;  // of 4 bits
#endif
}

// Splits two floats into three pairs of bfloat16 that sum to them (bf16x3).
__device__ inline void split_bf16x3(float low, float high, u32& first, u32& second, u32& third) {
    first = bf16_pair(low, high);
    low -= __uint_as_float(first << 16), high -= __uint_as_float(first & 0xFFFF0000u);
    second = bf16_pair(low, high);
    third = bf16_pair(low - __uint_as_float(second << 16),
                      high - __uint_as_float(second & 0xFFFF0000u));
}

struct Consumer {
    const Work& w;
    Barriers& barriers;
    const ScaleOffset *low_grid, *high_grid;  // of this thread's two rows
    int first, last;                          // first and last group in them
    const unsigned char *low_at, *high_at;    // this thread's bytes in the first stage
    u64 x;                                    // descriptor of x there
    float total[BLOCK_M / 2], part[IN_FLIGHT][BLOCK_M / 2];
    AOperand a[2];
    PipelineState<STAGES> state;

    __device__ u32 full() const { return shared_address(&barriers.full[state.stage]); }

    // This warp has read a stage.
    __device__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barriers.empty[stage]));
    }

    // Waits until the other consumer has issued its wgmmas, which then run in front of this one's.
    __device__ void wait_for_turn() const {
        if (IN_FLIGHT == 1) named_barrier_sync(TURN + threadIdx.x / 128, CONSUMER_THREADS);
    }

    __device__ void give_turn() const {
        if (IN_FLIGHT == 1) named_barrier_arrive(TURN + 1 - threadIdx.x / 128, CONSUMER_THREADS);
    }

    __device__ Pair grid(int group) const {
        return {low_grid[group - first], high_grid[group - first]};
    }

    // Dequantizes the K tile of the current stage.
    __device__ void load(AOperand& a) const {
        mbarrier_wait(full(), state.parity);
        a.load(low_at + state.stage * STAGE_BYTES, high_at + state.stage * STAGE_BYTES);
    }

    // Issues the wgmmas of a group of the current stage.
    __device__ void issue(AOperand& a, float (&part)[BLOCK_M / 2], int group) const {
        wait_for_turn();
        a.issue(part, x + state.stage * (STAGE_BYTES / 16), group);
        give_turn();
    }

    // Group UNIT of two K tiles is in flight: issues the next one's wgmmas, if it HAS_NEXT, and
    // adds this one's sums. The fragments of the first K tile are a[0], of the second a[1].
    template <int UNIT, bool HAS_NEXT> __device__ __forceinline__ void unit(int k_tile) {
        constexpr int GROUP = UNIT % GROUPS, NEXT = (UNIT + 1) % (2 * GROUPS);
        constexpr bool IS_LAST_GROUP = GROUP == GROUPS - 1;
        AOperand &now = a[UNIT / GROUPS], &next = a[NEXT / GROUPS];
        float (&sums)[BLOCK_M / 2] = part[UNIT % IN_FLIGHT];
        const Pair scales =
            grid(GROUPS > 1 ? min(k_tile * GROUPS + GROUP, last) : k_tile >> w.shift);
        const int stage = state.stage;
        if (IS_LAST_GROUP) state.advance();
        if (IS_LAST_GROUP && HAS_NEXT) load(next);
        if (IN_FLIGHT == 2 && HAS_NEXT) issue(next, part[NEXT % IN_FLIGHT], NEXT % GROUPS);
        complete<IN_FLIGHT == 2 && HAS_NEXT ? 1 : 0>(now, sums);
        if (IS_LAST_GROUP) release(stage);
        flush(total, sums, scales);
        if (IN_FLIGHT == 1 && HAS_NEXT) issue(next, part[0], NEXT % GROUPS);
    }

    // Groups UNIT to the last of TILES K tiles; a group follows the last, if it HAS_NEXT.
    template <int UNIT, int TILES, bool HAS_NEXT>
    __device__ __forceinline__ void units(int k_tile) {
        if constexpr (UNIT < TILES * GROUPS) {
            unit<UNIT, HAS_NEXT || UNIT + 1 < TILES * GROUPS>(k_tile + UNIT / GROUPS);
            units<UNIT + 1, TILES, HAS_NEXT>(k_tile);
        }
    }

    // The last K tiles are apart, so that there is no branch on the end between a wgmma and the
    // wait for it: the compiler would wait at once, as it does behind the first.
    __device__ void run_k_tiles(Range range) {
        if (range.begin == range.end) return;
        load(a[0]);
        if (threadIdx.x >= 128) give_turn();  // the first consumer begins
        issue(a[0], part[0], 0);
        int k_tile = range.begin;
        for (; k_tile + 2 < range.end; k_tile += 2) units<0, 2, true>(k_tile);
        if (k_tile + 2 == range.end)
            units<0, 2, false>(k_tile);
        else
            units<0, 1, false>(k_tile);
        if (threadIdx.x < 128) wait_for_turn();  // no barrier may be left with arrivals
    }

    // Waits until at most PENDING groups of wgmmas are in flight, so that those of `sums` are done.
    template <int PENDING>
    __device__ void complete(AOperand& now, float (&sums)[BLOCK_M / 2]) const {
        now.fence();  // wgmma reads these registers until it completes
        wgmma_wait<PENDING>();
        wgmma_fence_operand(sums);
        now.fence();
    }

    // Adds base · sum(x) of the groups.
    __device__ void add_offsets(Range range) {
        const int lane = threadIdx.x % 4;
        for (int chunk = 0; chunk < range.chunks; ++chunk, state.advance()) {
            u32 bases[3][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const ScaleOffset* grid = i % 2 ? high_grid : low_grid;
                float pair[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int group =
                        (range.chunk + chunk) * CHUNK + 2 * lane + j + (i >= 2 ? 8 : 0);
                    pair[j] = group >= range.group_begin && group < range.group_end
                                  ? base_of(grid[group - first])
                                  : 0.0f;
                }
                split_bf16x3(pair[0], pair[1], bases[0][i], bases[1][i], bases[2][i]);
            }
            mbarrier_wait(full(), state.parity);
            const u64 sums = x + state.stage * (STAGE_BYTES / 16);
            wgmma_fence_operand(total);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 3; ++i)
#pragma unroll
                for (int j = 0; j < 3 - i; ++j) wgmma_bf16(total, bases[i], sums + j * 2);
            wgmma_finish(total, bases);
            release(state.stage);
        }
    }
};

__device__ inline void consume_tiles(const Work& w, Barriers& barriers, ScaleOffset* grids,
                                     Tile tile, Range range) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = warp * 16 + lane / 4;
    // in a stage
    const int low = GATED ? warp * 8 + lane / 4 : mine, high = GATED ? low + ROWS / 2 : mine + 8;
    const int first = GROUPS > 1 ? range.begin * GROUPS : range.begin >> w.shift;
    const int last =
        (GROUPS > 1 ? min(range.end * GROUPS, w.groups) : ((range.end - 1) >> w.shift) + 1) - 1;
    stage_scales<CONSUMER_THREADS / 32, 16>(w, grids, tile.index, first, last - first + 1, warp);
    pdl_wait();
    pdl_launch_dependents();
    named_barrier_sync(1, CONSUMER_THREADS);
    const int quad_offset = lane % 4 * (PART_BYTES / 4);
    Consumer consumer = {w,
                         barriers,
                         grids + low * w.pitch,
                         grids + high * w.pitch,
                         first,
                         last,
                         shared + low * PART_BYTES + quad_offset,
                         shared + high * PART_BYTES + quad_offset,
                         k_major_descriptor(shared_address(shared) + W_BYTES, SWIZZLE_ATOM_BYTES)};
#pragma unroll
    for (int i = 0; i < BLOCK_M / 2; ++i) consumer.total[i] = 0.0f;
    consumer.run_k_tiles(range);
    if (USES_SUMS) consumer.add_offsets(range);
    named_barrier_sync(1, CONSUMER_THREADS);  // all consumers have read x
    store_results(consumer.total, mine, mine + 8);
}

extern "C" __global__ void SPLIT_CLUSTER __launch_bounds__(THREADS, 1)
    wq_gemm_pipelined(const __grid_constant__ TensorMap x_map,
                      const __grid_constant__ TensorMap w_map, const __grid_constant__ Work w) {
    const Tile tile = tile_of(w, blockIdx.x / SPLIT);
    Barriers& barriers = *reinterpret_cast<Barriers*>(shared + STAGES * STAGE_BYTES);
    // [ROWS][pitch]
    ScaleOffset* grids =
        reinterpret_cast<ScaleOffset*>(shared + STAGES * STAGE_BYTES + sizeof(Barriers));
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4);
        fence_mbarrier_init();
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    }
    __syncthreads();
    const Range range = range_of(w, tile.rank);
    const bool is_consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) < CONSUMERS;
    // Registers move from the producer to the consumers: 40 + 2 · 232 = 3 · 168, the launch's
    // total.
    if (is_consumer) {
        setmaxnreg_inc<232>();
        consume_tiles(w, barriers, grids, tile, range);
    } else {
        setmaxnreg_dec<40>();
        if (threadIdx.x == CONSUMER_THREADS)
            Producer{x_map, w_map, w, barriers, shared_address(shared), tile}.run(range);
        __syncwarp();
    }
    if (SPLIT > 1)
        cluster_sync();
    else if (is_consumer)
        named_barrier_sync(1, CONSUMER_THREADS);
    if (is_consumer) finish(w, tile);
    // no block may exit while others read its shared memory
    if (SPLIT > 1) cluster_sync_relaxed();
}

// work of a warp: a K tile, or a group
constexpr bool WARP_PER_TILE = GROUPS > 1 || !USES_SUMS;
// lanes that reduce one group's sum
constexpr int LANES_PER_SUM = WARP_PER_TILE ? 32 / GROUPS : 32;

struct PermuteWork {
    const u16* x;
    // [tokens, pitch]: K tiles of 128 columns, then per 16 groups 64 columns with their sums as
    // bf16x3
    u16* to;
    int tokens, columns, stride, pitch, k_tiles, groups, shift, units;  // units: warps for a row
};
static_assert(sizeof(PermuteWork) == 48, "wq_gemm_pipelined.py packs 48 bytes");

// Position in the permuted K tile of the first and third of a lane's four adjacent columns; the
// other two are at + 8.
//
// Slot 16 s + k is byte 2 (k % 2) + k / 8 of word s of the quad's thread k % 8 / 2; for 4-bit
// weights word s / 2, whose high nibbles are the odd s.
__device__ inline int slot_of(int lane) {
    if (BITS == 4) {
        const int half = lane / 4 % 2;  // of a byte
        if (GROUPS == 4) return (lane / 8 * 2 + half) * 16 + lane % 4 * 2;
        if (GROUPS == 2)
            return (lane / 16 * 4 + lane % 2 * 2 + half) * 16 +
                   (lane / 8 % 2 * 2 + lane / 2 % 2) * 2;
        return (lane % 4 * 2 + half) * 16 + lane / 8 * 2;
    }
    if (GROUPS == 4) return (lane / 8 * 2 + lane % 2) * 16 + lane % 8 / 2 * 2;
    return (lane / 16 * 4 + lane % 4) * 16 + lane / 4 % 4 * 2;
}

// Permutes the columns of x to the order of the weight fragments and computes the group sums of x.
extern "C" __global__ void __launch_bounds__(256)
    wq_permute_and_sum(const __grid_constant__ PermuteWork w) {
    pdl_launch_dependents();  // the GEMM's blocks load weights and scales meanwhile
    pdl_wait();
    const int lane = threadIdx.x % 32, at = blockIdx.x * 8 + threadIdx.x / 32;
    const int token = at / w.units, unit = at - token * w.units;
    if (token >= w.tokens) return;
    const u16* row = w.x + static_cast<long long>(token) * w.stride;
    u16* to = w.to + static_cast<long long>(token) * w.pitch;
    const int slot = slot_of(lane);
    float sum = 0.0f;
    if (unit < (WARP_PER_TILE ? w.k_tiles : w.groups)) {
        const int begin = WARP_PER_TILE ? unit : unit << w.shift,
                  end = WARP_PER_TILE ? unit + 1 : min(begin + (1 << w.shift), w.k_tiles);
        for (int tile_index = begin; tile_index < end; ++tile_index) {
            const int column = tile_index * COLUMNS + lane * 4;
            uint2 four = {0, 0};
            if (column < w.columns) four = *reinterpret_cast<const uint2*>(row + column);
            sum += (to_float(four.x & 0xFFFF) + to_float(four.x >> 16)) +
                   (to_float(four.y & 0xFFFF) + to_float(four.y >> 16));
            u32* piece_to = reinterpret_cast<u32*>(to + tile_index * COLUMNS + slot);
            piece_to[0] = __byte_perm(four.x, four.y, 0x5410);
            piece_to[4] = __byte_perm(four.x, four.y, 0x7632);
        }
    }
    if constexpr (USES_SUMS) {
#pragma unroll
        for (int by = LANES_PER_SUM / 2; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (lane % LANES_PER_SUM == 0) {
            u32 parts[3];
            split_bf16x3(sum, 0.0f, parts[0], parts[1], parts[2]);
            const int group = unit * (32 / LANES_PER_SUM) + lane / LANES_PER_SUM;
            u16* sums = to + w.k_tiles * COLUMNS + group / CHUNK * 64 + group % CHUNK;
#pragma unroll
            for (int i = 0; i < 3; ++i) sums[i * CHUNK] = parts[i] & 0xFFFF;
        }
    }
}
