// Weight-only int4/int8 GEMM of many rows of x (prefill).
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N]); with GATED SwiGLU of the two
//     halves of N
// Dtypes: x and out bfloat16 or float16; weights int8 or packed int4; float16 group scales and
//     offsets (float32 scales of int8 weights without offsets); float32 accumulators
// Layout: row-major; packed codes as in ops/int4_linear.py; scales and offsets [N, groups]
// Range: 129 ≤ M ≤ 2048 (int8 and groups of 64: ≤ 1024, groups of 32: ≤ 256); N a multiple of 8
//     (GATED: of 16), K of 32; rows of x 16-byte aligned
// Technique: TMA, mbarrier pipeline, wgmma with A in registers, split-K over a thread-block cluster
//     (DSMEM), setmaxnreg, PDL
// Ops: int4_linear, int4_linear_swiglu, int8_linear, int8_linear_swiglu, int8_group_linear
//     (launched by wq_gemm_large_m.py)
//
// The weight is the A operand: a consumer warpgroup dequantizes 64 weight rows of 32 columns in
// registers while the wgmmas of the columns before run. Sums stay in one set of accumulators, which
// leaves registers for BLOCK_M = 256 rows of x. A block computes tile after tile: K tiles and
// scales of the next are loaded while the sums of one are stored.
//
// Dequantization: the bits of a code are put into the mantissa of a float, which then is a linear
// function of the code; scale and offset take that function into account. Each weight is rounded
// once.
//
// Macros: BITS (of a weight), GROUPS (groups per 64 columns: 1, 2), and those of wq_gemm_tile.cuh
// with BLOCK_M 128, 192 or 256.
#include "weight_only_gemm/wq_gemm_tile.cuh"

// A K tile of the weight is stored in parts of 16 bytes a row, so that most of the rows that a warp
// reads together are in different banks.
constexpr int COLUMNS = 64, MMAS = COLUMNS / 16, PART_BYTES = 16, ROW_BYTES = COLUMNS * BITS / 8,
              PARTS = ROW_BYTES / PART_BYTES;
constexpr u32 PART_TILE_BYTES = ROWS * PART_BYTES, W_BYTES = PARTS * PART_TILE_BYTES,
              X_BYTES = BLOCK_M * COLUMNS * 2, STAGE_BYTES = X_BYTES + W_BYTES;
static_assert(STAGES >= 3, "a K tile is read before the stage of the one before is given back");
static_assert(SPLIT == 1 || STAGES * STAGE_BYTES >= RESULT_BYTES,
              "the results must fit in the pipeline's memory");

// A block's range of K tiles.
struct Range {
    int begin, end;
};

__device__ inline Range range_of(const Work& w, int rank) {
    const int each = (w.k_tiles + SPLIT - 1) / SPLIT;
    return {min(rank * each, w.k_tiles), min((rank + 1) * each, w.k_tiles)};
}

// Calls body for each tile of the output that this block computes; with split-K a block has one.
template <typename Body> __device__ __forceinline__ void each_tile(const Work& w, Body body) {
    const int step = gridDim.x / SPLIT;
    for (int number = blockIdx.x / SPLIT; number < w.tiles; number += step) {
        body(tile_of(w, number));
        if (SPLIT > 1) return;
    }
}

struct BlockBarriers {
    PipelineBarriers<STAGES> tiles;
    PipelineBarriers<SCALE_BUFFERS> scales;
};

// Loads the K tiles of all tiles, across the ends of tiles.
struct Producer {
    const TensorMap &x_map, &w_map;
    const Work& work;
    PipelineBarriers<STAGES>& barriers;
    u32 base;

    __device__ u32 full(int stage) const { return shared_address(&barriers.full[stage]); }

    __device__ void load_w(const Tile& tile, int stage, int k_tile) const {
        mbarrier_arrive_expect_tx(full(stage), STAGE_BYTES);
        load_weight_parts<PARTS, PART_BYTES>(w_map, base + stage * STAGE_BYTES + X_BYTES,
                                             full(stage), k_tile * ROW_BYTES, tile.index,
                                             work.rows);
    }

    __device__ void load_x(const Tile& tile, int stage, int k_tile) const {
        tma_load(base + stage * STAGE_BYTES, x_map, full(stage), k_tile * COLUMNS, tile.token);
    }

    __device__ void run(Range range) const {
        const int ahead = min(range.end - range.begin, STAGES);
        const Tile first = tile_of(work, blockIdx.x / SPLIT);
        for (int i = 0; i < ahead; ++i) load_w(first, i, range.begin + i);
        pdl_wait();
        for (int i = 0; i < ahead; ++i) load_x(first, i, range.begin + i);
        PipelineState<STAGES> state;
        int in_flight = ahead;  // K tiles that were issued before the loop
        each_tile(work, [&](const Tile& tile) {
            for (int k_tile = range.begin; k_tile < range.end; ++k_tile, state.advance()) {
                if (in_flight-- > 0) continue;
                mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);
                load_w(tile, state.stage, k_tile);
                load_x(tile, state.stage, k_tile);
            }
        });
    }
};

// Groups of a block's range of K.
struct GroupRange {
    int first, last;
};

__device__ inline GroupRange groups_of(const Work& w, Range range) {
    return {range.begin * GROUPS >> w.shift,
            min((range.end * GROUPS - 1) >> w.shift, w.groups - 1)};
}

__device__ inline ScaleOffset* scale_buffer(const Work& w, ScaleOffset* grids, int buffer) {
    return grids + buffer * (ROWS * w.pitch);
}

// Stages the scales of all tiles but the first, whose scales the consumers stage, by the three
// warps beside the producer's.
__device__ inline void stage_scales_ahead(const Work& w, PipelineBarriers<SCALE_BUFFERS>& barriers,
                                          ScaleOffset* grids, Range range) {
    constexpr int FIRST_WARP = CONSUMER_THREADS / 32 + 1, WARPS = 3, STAGED = 2;
    const GroupRange groups = groups_of(w, range);
    PipelineState<SCALE_BUFFERS> state;
    bool is_first = true;
    each_tile(w, [&](const Tile& tile) {
        if (!is_first) {
            mbarrier_wait(shared_address(&barriers.empty[state.stage]), state.parity ^ 1);
            stage_scales<WARPS, 8>(w, scale_buffer(w, grids, state.stage), tile.index, groups.first,
                                   groups.last - groups.first + 1, threadIdx.x / 32 - FIRST_WARP);
        }
        is_first = false;
        named_barrier_sync(STAGED, WARPS * 32);
        if (threadIdx.x == FIRST_WARP * 32)
            mbarrier_arrive(shared_address(&barriers.full[state.stage]));
        state.advance();
    });
}

// The weights of a group of a row: scale · code + offset, in float32.
struct Affine {
    float scale, offset;

    // The same of a code that reads as magic + code / step.
    __device__ Affine of_reading(float magic, float step) const {
        const float own = scale * step;
        return {own, fmaf(-magic, own, offset)};
    }
    __device__ u32 pair(float first, float second) const {
        return rounded_pair(fmaf(scale, first, offset), fmaf(scale, second, offset));
    }
};

// A float32 scale to 15 bits, so that its product with the magic of a reading is exact: what is
// rounded there would be added to all weights of a row.
__device__ inline float exact_scale(float scale) {
    return SCALE_FP32 ? __uint_as_float((__float_as_uint(scale) + 256) & ~511u) : scale;
}

__device__ inline Affine affine_of(ScaleOffset both) {
    const float scale = exact_scale(scale_of(both));
#if OFFSET
    return {scale, half_to_float(both >> 16)};
#else
    return {scale, BITS == 4 ? -8.0f * scale : 0.0f};
#endif
}

// Dequantizes two bytes of a row of a part to a word of the A operand.
#if BITS == 4
// (word & MASK) | the exponent of 128 by one lop3; the compiler would emit two. Reads as 128 + the
// masked bits / 2^16.
template <u32 MASK> __device__ inline float mantissa_bits(u32 word) {
    u32 bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(bits) : "r"(word), "n"(MASK), "r"(0x43000000u));
    return __uint_as_float(bits);
}

// Low nibbles are two columns of one wgmma, high nibbles those 16 columns on, of the next.
struct Dequantizer {
    Affine low, high;

    Dequantizer() = default;
    __device__ explicit Dequantizer(Affine affine)
        : low(affine.of_reading(128, 2)), high(affine.of_reading(128, 0.125f)) {}

    template <int MMA> __device__ u32 word(u32 bytes) const {
        const u32 first = bytes << 15, second = bytes << 7;  // the bytes' nibbles at bits 15 and 19
        return MMA % 2 == 0
                   ? low.pair(mantissa_bits<0x00078000>(first), mantissa_bits<0x00078000>(second))
                   : high.pair(mantissa_bits<0x00780000>(first), mantissa_bits<0x00780000>(second));
    }
};
#else
struct Dequantizer {
    Affine affine;

    Dequantizer() = default;
    __device__ explicit Dequantizer(Affine affine) : affine(affine.of_reading(32768 + 128, 1)) {}

    // A byte, raised by 128, in the mantissa of 2^15, whose last bit is worth 1 / 256.
    template <int MMA> __device__ u32 word(u32 bytes) const {
        const u32 raised = bytes ^ 0x8080u;
        return affine.pair(__uint_as_float(__byte_perm(raised, 0x47000000u, 0x7604)),
                           __uint_as_float(__byte_perm(raised, 0x47000000u, 0x7614)));
    }
};
#endif

struct Consumer {
    const Work& w;
    BlockBarriers& barriers;
    ScaleOffset* grids;
    int low, high;  // this thread's two rows of the weight tile
    GroupRange groups;
    const unsigned char* bytes;  // this thread's two bytes of row 0 in the first stage
    u64 x;                       // descriptor of x there
    float total[BLOCK_M / 2];
    u32 a[MMAS][4];          // A operands of a K tile's wgmmas
    u32 two[PARTS][4];       // this thread's bytes of a K tile, for the words of A
    ScaleOffset grid[2][2];  // scales of both halves and of both rows
    Dequantizer rows[2];
    PipelineState<STAGES> state;
    PipelineState<SCALE_BUFFERS> scale_state;
    int previous = -1;  // stage of the K tile before, which wgmmas in flight may read

    // Of this warp.
    __device__ __forceinline__ void arrive(u64& barrier) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barrier));
    }

    __device__ __forceinline__ void wait_for(const PipelineState<STAGES>& at) const {
        mbarrier_wait(shared_address(&barriers.tiles.full[at.stage]), at.parity);
    }

    // Reads the bytes of half of a K tile.
    template <int HALF_TILE> __device__ __forceinline__ void read_bytes(int stage) {
        const unsigned char* at = bytes + stage * STAGE_BYTES;
#pragma unroll
        for (int part = HALF_TILE * PARTS / 2; part < (HALF_TILE + 1) * PARTS / 2; ++part)
#pragma unroll
            for (int word = 0; word < 4; ++word)  // row word % 2, 8 columns on in words 2, 3
                two[part][word] = *reinterpret_cast<const u16*>(
                    at + part * PART_TILE_BYTES + (word % 2 ? high : low) * PART_BYTES +
                    word / 2 * 8);
    }

    __device__ __forceinline__ void read_scales(const ScaleOffset* scales, int k_tile) {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const int group = min((k_tile * GROUPS + i) >> w.shift, groups.last) - groups.first;
            grid[i][0] = scales[low * w.pitch + group], grid[i][1] = scales[high * w.pitch + group];
        }
    }

    // Multiplies half of a K tile. Its A is dequantized while the wgmmas of the half before run;
    // those of the same half of the K tile before, whose registers it takes, are complete.
    template <int HALF_TILE> __device__ __forceinline__ void multiply() {
        constexpr int FIRST = HALF_TILE * MMAS / 2;
        complete<1, FIRST>();
        if (HALF_TILE == 1) release_previous();
        if (HALF_TILE == 0 || GROUPS > 1) {
            rows[0] = Dequantizer(affine_of(grid[GROUPS > 1 ? HALF_TILE : 0][0]));
            rows[1] = Dequantizer(affine_of(grid[GROUPS > 1 ? HALF_TILE : 0][1]));
        }
        dequantize<FIRST>();
        wgmma_fence();
#pragma unroll
        for (int i = FIRST; i < FIRST + MMAS / 2; ++i)
            // descriptor addresses count 16 bytes
            wgmma(total, a[i][0], a[i][1], a[i][2], a[i][3],
                  x + (state.stage * STAGE_BYTES + i * 32) / 16, 1);
        wgmma_commit();
    }

    template <int FIRST> __device__ __forceinline__ void dequantize() {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            a[FIRST][word] = rows[word % 2].template word<0>(two[FIRST * PARTS / MMAS][word]);
            a[FIRST + 1][word] =
                rows[word % 2].template word<1>(two[(FIRST + 1) * PARTS / MMAS][word]);
        }
    }

    // Allows the producer to load the stage of the K tile before.
    __device__ __forceinline__ void release_previous() const {
        if (previous >= 0) arrive(barriers.tiles.empty[previous]);
    }

    // Waits until at most PENDING halves are in flight, so that the registers of two wgmmas are
    // free: wgmma reads them until it completes.
    template <int PENDING, int FIRST> __device__ __forceinline__ void complete() {
        wgmma_fence_operand(a[FIRST]);
        wgmma_fence_operand(a[FIRST + 1]);
        wgmma_wait<PENDING>();
        wgmma_fence_operand(a[FIRST]);
        wgmma_fence_operand(a[FIRST + 1]);
    }

    // Multiplies a K tile, and reads the bytes and scales of the next one meanwhile, if it
    // HAS_NEXT.
    template <bool HAS_NEXT>
    __device__ __forceinline__ void multiply_tile(const ScaleOffset* scales, int k_tile) {
        PipelineState<STAGES> next = state;
        next.advance();
        multiply<0>();
        if (HAS_NEXT) {
            wait_for(next);
            read_bytes<0>(next.stage);
        }
        multiply<1>();
        if (HAS_NEXT) {
            read_bytes<1>(next.stage);
            read_scales(scales, k_tile + 1);
        }
        previous = state.stage;
        state = next;
    }

    // The sums of a tile.
    __device__ __forceinline__ void run(Range range) {
        const ScaleOffset* scales = scale_buffer(w, grids, scale_state.stage);
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) total[i] = 0.0f;
        wait_for(state);
        read_bytes<0>(state.stage);
        read_bytes<1>(state.stage);
        read_scales(scales, range.begin);
        for (int k_tile = range.begin; k_tile < range.end - 1; ++k_tile)
            multiply_tile<true>(scales, k_tile);
        multiply_tile<false>(scales, range.end - 1);
        complete<0, 0>();
        complete<0, MMAS / 2>();
        wgmma_fence_operand(total);
        release_previous();
        previous = -1;
        arrive(barriers.scales.empty[scale_state.stage]);
        scale_state.advance();
    }

    __device__ void wait_for_scales() const {
        mbarrier_wait(shared_address(&barriers.scales.full[scale_state.stage]), scale_state.parity);
    }
};

// As silu_mul, with an approximate division: 64 exact ones of a thread took as long as four K
// tiles.
__device__ inline float silu_mul_fast(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Stores a warp's part of a tile: 16 weight rows are columns of the output, GATED eight.
__device__ __forceinline__ void store_tile(const Work& w, const Consumer& consumer,
                                           const Tile& tile) {
    constexpr int SPAN = GATED ? ROWS / 2 : ROWS;
    const int lane = threadIdx.x % 32, columns = GATED ? w.rows / 2 : w.rows,
              column = tile.index * SPAN + threadIdx.x / 32 * (GATED ? 8 : 16) +
                       lane % 4 * (GATED ? 2 : 4);
    const float low_bias = w.bias ? to_float(w.bias[row_of(tile.index, consumer.low, w.rows)]) : 0,
                high_bias =
                    w.bias ? to_float(w.bias[row_of(tile.index, consumer.high, w.rows)]) : 0;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 8; ++i) {
        const float (&sums)[BLOCK_M / 2] = consumer.total;
        const u32 low_pair = rounded_pair(sums[4 * i] + low_bias, sums[4 * i + 1] + low_bias),
                  high_pair =
                      rounded_pair(sums[4 * i + 2] + high_bias, sums[4 * i + 3] + high_bias);
        const int token = tile.token + 8 * i + lane / 4;
        u16* to = w.out + static_cast<long long>(token) * columns + column;
        const bool exists = token < w.tokens && column < columns;
        if (GATED) {
            const u32 pair =
                transpose_8x8(rounded_pair(silu_mul_fast(::low(low_pair), ::low(high_pair)),
                                           silu_mul_fast(::high(low_pair), ::high(high_pair))));
            if (exists) *reinterpret_cast<u32*>(to) = pair;
        } else {
            const uint2 four = {transpose_8x8(low_pair), transpose_8x8(high_pair)};
            if (exists) *reinterpret_cast<uint2*>(to) = four;
        }
    }
}

__device__ inline void consume(const Work& w, BlockBarriers& barriers, ScaleOffset* grids,
                               Range range) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4;
    // Rows of the weight tile, so that a lane has four adjacent columns once transposed; GATED:
    // a gate and its value.
    const int low = GATED ? warp * 8 + row : warp * 16 + row / 2 * 4 + row % 2,
              high = low + (GATED ? ROWS / 2 : 2);
    const GroupRange groups = groups_of(w, range);
    stage_scales<CONSUMER_THREADS / 32, 16>(w, grids, tile_of(w, blockIdx.x / SPLIT).index,
                                            groups.first, groups.last - groups.first + 1, warp);
    pdl_wait();
    pdl_launch_dependents();
    named_barrier_sync(1, CONSUMER_THREADS);
    Consumer consumer = {w,
                         barriers,
                         grids,
                         low,
                         high,
                         groups,
                         shared + X_BYTES + lane % 4 * 2,
                         k_major_descriptor(shared_address(shared), SWIZZLE_ATOM_BYTES)};
    each_tile(w, [&](const Tile& tile) {
        // split-K: one tile, whose scales this warpgroup has staged
        if (SPLIT == 1) consumer.wait_for_scales();
        consumer.run(range);
        if (SPLIT == 1) store_tile(w, consumer, tile);
    });
    if (SPLIT == 1) return;
    named_barrier_sync(1, CONSUMER_THREADS);  // all consumers have read x
    const int result = GATED ? warp * 16 + row : low;
    store_results(consumer.total, result, result + (GATED ? 8 : 2));
}

extern "C" __global__ void SPLIT_CLUSTER __launch_bounds__(THREADS, 1)
    wq_gemm_large_m(const __grid_constant__ TensorMap x_map,
                    const __grid_constant__ TensorMap w_map, const __grid_constant__ Work w) {
    const Range range = range_of(w, SPLIT > 1 ? int(cluster_rank()) : 0);
    BlockBarriers& barriers = *reinterpret_cast<BlockBarriers*>(shared + STAGES * STAGE_BYTES);
    // [SCALE_BUFFERS][ROWS][pitch]
    ScaleOffset* grids =
        reinterpret_cast<ScaleOffset*>(shared + STAGES * STAGE_BYTES + sizeof(BlockBarriers));
    if (threadIdx.x == 0) {
        barriers.tiles.init(CONSUMERS * 4);
        barriers.scales.init(CONSUMERS * 4);
        fence_mbarrier_init();
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    }
    __syncthreads();
    const bool is_consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) < CONSUMERS;
    // Registers move from the producer to the consumers: 40 + 2 · 232 = 3 · 168, the launch's
    // total.
    if (is_consumer) {
        setmaxnreg_inc<232>();
        consume(w, barriers, grids, range);
    } else {
        setmaxnreg_dec<40>();
        if (threadIdx.x == CONSUMER_THREADS)
            Producer{x_map, w_map, w, barriers.tiles, shared_address(shared)}.run(range);
        else if (SPLIT == 1 && threadIdx.x >= CONSUMER_THREADS + 32)
            stage_scales_ahead(w, barriers.scales, grids, range);
        __syncwarp();
    }
    if (SPLIT == 1) return;
    cluster_sync();
    if (is_consumer) finish(w, tile_of(w, blockIdx.x / SPLIT));
    cluster_sync_relaxed();  // no block may exit while others read its shared memory
}
