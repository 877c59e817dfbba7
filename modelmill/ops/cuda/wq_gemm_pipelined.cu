// Products of 9 to 64 rows with 4- and 8-bit weights, and of fewer with large 8-bit ones: everything on its way in shared
// memory, so that a multiplying warp has no load from memory outstanding when its products begin.
//
// One thread keeps STAGES pieces of K on their way, each 128 columns of ROWS rows of the weight and of x; the weights of
// the first leave before the kernel in front has ended. CONSUMERS warpgroups take 64 rows of the weight each, which are the
// left operand of wgmma, in registers. A thread reads a part of two rows, 8 or 16 bytes at a time, and uses it as it is:
// slots along K may stand for any columns, as long as x comes in the same order. ``wq_permute_and_sum`` has brought it into that
// order, a kernel in front that also adds up each group of x.
//
// A 4-bit code c is put under the exponent of 128 and reads as 128 + c; in float16 c alone is the subnormal c / 2^24, which
// products take exactly. Bytes have signs (dequant_int8.cuh). y = sum over groups of scale * part + base * (sum of x), base =
// offset - 128 * scale, or the offset. The second term is a product of its own, with groups for columns: base and the sums
// are three bfloat16 each, the rest of what came before, and six of the nine pairs of them count.
//
// SPLIT blocks of a cluster share K, and add up in the first one's order at the end.
//
// Macros: BITS (of a weight), GROUPS (of a piece of 8-bit weights: 1, 2, 4), BOX (rows of x, padded: 32, 64), CONSUMERS, SPLIT,
// STAGES, GATED (as weight_only.cuh), OFFSET (0: symmetric), WIDE (scales are float32), HALF.
#include "cluster.cuh"
#include "weight_only_types.cuh"
#include "smem_pipeline.cuh"
#include "dequant_int8.cuh"
#include "wgmma.cuh"

#if BITS == 8
constexpr float UNIT = 1.0f, RAISED = 0.0f;
#elif defined(HALF)
constexpr u32 UNDER = 0;
constexpr float UNIT = 16777216.0f, RAISED = 0.0f;
#else
constexpr u32 UNDER = RAISED_PAIR;
constexpr float UNIT = 1.0f, RAISED = 128.0f;
#endif
constexpr int ROWS = 64 * CONSUMERS, MULTIPLIERS = 128 * CONSUMERS, PITCH = ROWS + 4, COLUMNS = 128, CHUNK = 16;
// A piece of the weight comes in parts of a few columns, so that a warp reads one from end to end.
constexpr int BYTES = COLUMNS * BITS / 8, PARTS = BITS == 4 ? 1 : GROUPS == 4 ? 4 : 2, WIDTH = BYTES / PARTS;
constexpr u32 PART = ROWS * WIDTH, WEIGHTS = PARTS * PART;
constexpr u32 SLAB = BOX * 128, STAGE = WEIGHTS + 2 * SLAB; // a slab: 64 columns of x
constexpr int WORDS = BYTES / 16, EACH = WORDS / PARTS; // that a thread has of a row's piece, of a part
constexpr int PRODUCTS = 8 / GROUPS;                    // of a group
constexpr bool SUMS = BITS == 4 || OFFSET;
static_assert(GROUPS == 1 || BITS == 8, "a thread's runs of 4-bit weights are groups of their own");
static_assert(!WIDE || !SUMS, "scale and offset share a word");
static_assert(STAGES * STAGE >= BOX * PITCH * 4, "the sums find room where x was");
static_assert(BOX % SPLIT == 0, "each block of a cluster writes some rows of the output");

struct Work {
    const ScaleT *scale, *offset; // [N, groups]
    const u16 *bias;            // of x's type, or null
    u16 *out;
    int tokens, rows, pieces, groups, shift, pitch; // shift: pieces of a group, as a power of two; pitch: of the grids
};
static_assert(sizeof(Work) == 56, "wq_gemm_pipelined.py packs 56 bytes");

typedef PipelineBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// Two bfloat16, whatever x is.
__device__ inline u32 bf16_pair(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// As wgmma.cuh's products with the left operand in registers, in bfloat16 whatever x is, added.
__device__ inline void wgmma_bf16(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : HOLD_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void wgmma_bf16(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NAMES_16
                 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : HOLD_16(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#if BITS == 4
// (word >> by) & 0x000F000F | UNDER in one instruction behind the shift: the compiler would take two.
__device__ inline u32 codes(u32 word, int by) {
    u32 both;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(both) : "r"(word >> by), "r"(UNDER));
    return both;
}
#endif

// Four floats of another block's shared memory.
__device__ inline float4 of_rank(const float *mine, int rank) {
    float4 got;
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
                 : "=f"(got.x), "=f"(got.y), "=f"(got.z), "=f"(got.w)
                 : "r"(shared_address(mine)), "r"(rank)
                 : "memory");
    return got;
}

// Of the weight rows in a stage, the one in memory; those past the end repeat the last. GATED: the gate's, then up's.
__device__ inline int row_of(int tile, int mine, int rows) {
    if (GATED) {
        const int half = rows / 2, below = mine >= ROWS / 2;
        return min(tile * (ROWS / 2) + mine - below * (ROWS / 2), half - 1) + below * half;
    }
    return min(tile * ROWS + mine, rows - 1);
}

// What a block has: pieces, the groups that begin there (whose sums it multiplies), and those in chunks of 16.
struct Range {
    int begin, end, own, owned, chunk, chunks;
};

__device__ inline Range range_of(const Work &w, int rank) {
    const int each = (w.pieces + SPLIT - 1) / SPLIT, up = (1 << w.shift) - 1;
    Range r;
    r.begin = min(rank * each, w.pieces), r.end = min((rank + 1) * each, w.pieces);
    r.own = GROUPS > 1 ? min(r.begin * GROUPS, w.groups) : (r.begin + up) >> w.shift;
    r.owned = GROUPS > 1 ? min(r.end * GROUPS, w.groups) : (r.end + up) >> w.shift;
    r.chunk = r.own / CHUNK, r.chunks = SUMS && r.owned > r.own ? (r.owned - 1) / CHUNK - r.chunk + 1 : 0;
    return r;
}

struct Producer {
    const TensorMap &x_map, &w_map;
    const Work &work;
    Barriers &barriers;
    u32 base;
    int tile;

    __device__ u32 full(int stage) const { return shared_address(&barriers.full[stage]); }

    __device__ void weights(int stage, int number) const {
        const u32 target = base + stage * STAGE;
        mbarrier_arrive_expect_tx(full(stage), STAGE);
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const u32 part = target + i * PART, byte = number * BYTES + i * WIDTH;
            if (GATED) {
                tma_load(part, w_map, full(stage), byte, tile * (ROWS / 2));
                tma_load(part + PART / 2, w_map, full(stage), byte, work.rows / 2 + tile * (ROWS / 2));
            } else {
                tma_load(part, w_map, full(stage), byte, tile * ROWS);
            }
        }
    }

    __device__ void columns(int stage, int number) const {
        const u32 target = base + stage * STAGE + WEIGHTS;
        tma_load(target, x_map, full(stage), number * COLUMNS, 0);
        tma_load(target + SLAB, x_map, full(stage), number * COLUMNS + 64, 0);
    }

    __device__ void run(Range range) const {
        const int ahead = min(range.end - range.begin, STAGES);
        for (int i = 0; i < ahead; ++i) weights(i, range.begin + i);
        pdl_wait();
        for (int i = 0; i < ahead; ++i) columns(i, range.begin + i);
        PipelineState<STAGES> place;
        for (int i = 0; i < ahead; ++i) place.advance();
        for (int number = range.begin + ahead; number < range.end; ++number, place.advance()) {
            mbarrier_wait(shared_address(&barriers.empty[place.stage]), place.parity ^ 1);
            weights(place.stage, number);
            columns(place.stage, number);
        }
        for (int chunk = 0; chunk < range.chunks; ++chunk, place.advance()) {
            mbarrier_wait(shared_address(&barriers.empty[place.stage]), place.parity ^ 1);
            mbarrier_arrive_expect_tx(full(place.stage), SLAB);
            tma_load(base + place.stage * STAGE + WEIGHTS, x_map, full(place.stage),
                     work.pieces * COLUMNS + (range.chunk + chunk) * 64, 0);
        }
    }
};

// A scale of a row and group, and its offset: two float16 in a word, or one number where there are none.
#if OFFSET
typedef u32 ScaleOffset;
__device__ inline ScaleOffset pack_scale_offset(u16 scale, u16 offset) { return scale | static_cast<u32>(offset) << 16; }
#else
typedef ScaleT ScaleOffset;
__device__ inline ScaleOffset pack_scale_offset(ScaleT scale, ScaleT) { return scale; }
#endif
__device__ inline float scale_of(u32 both) { return widened(both & 0xFFFF); }
__device__ inline float scale_of(u16 scale) { return widened(scale); }
__device__ inline float scale_of(float scale) { return scale; }

// Those of the block's rows and groups. A warp asks for all its rows' before it stores any: one after the other they took a
// third of the kernel's time.
__device__ inline void stage_scales(const Work &w, ScaleOffset *grids, int tile, int first, int count) {
    constexpr int WARPS = MULTIPLIERS / 32, OWN = ROWS / WARPS;
    const int warp = threadIdx.x / 32;
    for (int g = threadIdx.x % 32; g < count; g += 32) {
        ScaleT scale[OWN], offset[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const long long at = static_cast<long long>(row_of(tile, warp + i * WARPS, w.rows)) * w.groups + first + g;
            scale[i] = __ldg(w.scale + at);
            offset[i] = OFFSET ? __ldg(w.offset + at) : ScaleT(0);
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) grids[(warp + i * WARPS) * w.pitch + g] = pack_scale_offset(scale[i], offset[i]);
    }
}

// A thread's words of a row's piece; at: its first one.
__device__ inline void read(u32 (&words)[WORDS], const unsigned char *at) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        u32 *to = words + i * EACH;
        if (EACH == 4) {
            const uint4 four = *reinterpret_cast<const uint4 *>(at + i * PART);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else {
            const uint2 two = *reinterpret_cast<const uint2 *>(at + i * PART);
            to[0] = two.x, to[1] = two.y;
        }
    }
}

// The left operand of a piece's eight products, from two rows.
struct LeftOperand {
    u32 a[8][4];

    __device__ void take(const unsigned char *low_at, const unsigned char *high_at) {
        u32 low[WORDS], high[WORDS];
        read(low, low_at);
        read(high, high_at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 l = low[i * WORDS / 8], h = high[i * WORDS / 8];
#if BITS == 4
            const int by = i % 2 * 4;
            a[i][0] = codes(l, by), a[i][1] = codes(h, by), a[i][2] = codes(l, by + 8), a[i][3] = codes(h, by + 8);
#else
            a[i][0] = dequant_int8_pair(l), a[i][1] = dequant_int8_pair(h);
            a[i][2] = dequant_int8_pair(l >> 8), a[i][3] = dequant_int8_pair(h >> 8);
#endif
        }
    }

    __device__ void hold() {
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_fence_operand(a[i]);
    }

    // Those of one group of the piece.
    __device__ void issue(float (&part)[BOX / 2], u64 x, int group) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) {
            const int i = group * PRODUCTS + j;
            const u64 right = x + (i / 4 * SLAB + i % 4 * 32) / 16; // descriptors count 16 bytes
            wgmma(part, a[i][0], a[i][1], a[i][2], a[i][3], right, j > 0);
        }
        wgmma_commit();
    }
};

struct Pair {
    ScaleOffset low, high; // of this thread's two rows
};

__device__ inline void flush(float (&total)[BOX / 2], const float (&part)[BOX / 2], Pair of) {
    const float low = scale_of(of.low) * UNIT, high = scale_of(of.high) * UNIT;
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) total[i] = fmaf(i % 4 < 2 ? low : high, part[i], total[i]);
}

__device__ inline float base_of(ScaleOffset both) {
    const float scale = scale_of(both);
#if OFFSET
    return widened(both >> 16) - RAISED * scale;
#else
    return -8.0f * scale - RAISED * scale; // of 4 bits
#endif
}

// Of two numbers three pairs of bfloat16 whose sum they are.
__device__ inline void split_bf16x3(float low, float high, u32 &first, u32 &second, u32 &third) {
    first = bf16_pair(low, high);
    low -= __uint_as_float(first << 16), high -= __uint_as_float(first & 0xFFFF0000u);
    second = bf16_pair(low, high);
    third = bf16_pair(low - __uint_as_float(second << 16), high - __uint_as_float(second & 0xFFFF0000u));
}

struct Consumer {
    const Work &w;
    Barriers &barriers;
    const ScaleOffset *low_grid, *high_grid; // of this thread's two rows
    int first, last;                  // groups that lie first and last in them
    float total[BOX / 2];
    PipelineState<STAGES> place;

    __device__ u32 full() const { return shared_address(&barriers.full[place.stage]); }

    // This warp has read a stage.
    __device__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&barriers.empty[stage]));
    }

    // Of a piece: read before its products, which then have nothing to wait for behind them.
    __device__ void grids(Pair (&to)[GROUPS], int number) const {
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const int group = GROUPS > 1 ? min(number * GROUPS + i, last) : number >> w.shift;
            to[i] = {low_grid[group - first], high_grid[group - first]};
        }
    }

    __device__ void pieces(Range range, const unsigned char *low_at, const unsigned char *high_at, u64 x) {
        float part[BOX / 2];
        for (int number = range.begin; number < range.end; ++number) {
            Pair grid[GROUPS];
            grids(grid, number);
            mbarrier_wait(full(), place.parity);
            LeftOperand left;
            left.take(low_at + place.stage * STAGE, high_at + place.stage * STAGE);
            const u64 columns = x + place.stage * (STAGE / 16);
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                left.issue(part, columns, i);
                left.hold(); // they are read until the products have ended
                wgmma_wait<0>();
                wgmma_fence_operand(part);
                left.hold();
                if (i == GROUPS - 1) {
                    release(place.stage);
                    place.advance();
                }
                flush(total, part, grid[i]);
            }
        }
    }

    // What the groups' bases take from the sums of x.
    __device__ void bases(Range range, u64 x) {
        const int lane = threadIdx.x % 4;
        for (int chunk = 0; chunk < range.chunks; ++chunk, place.advance()) {
            u32 a[3][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const ScaleOffset *grid = i % 2 ? high_grid : low_grid;
                float pair[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int group = (range.chunk + chunk) * CHUNK + 2 * lane + j + (i >= 2 ? 8 : 0);
                    pair[j] = group >= range.own && group < range.owned ? base_of(grid[group - first]) : 0.0f;
                }
                split_bf16x3(pair[0], pair[1], a[0][i], a[1][i], a[2][i]);
            }
            mbarrier_wait(full(), place.parity);
            const u64 sums = x + place.stage * (STAGE / 16);
            wgmma_fence_operand(total);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 3; ++i)
#pragma unroll
                for (int j = 0; j < 3 - i; ++j) wgmma_bf16(total, a[i], sums + j * 2);
            wgmma_commit();
#pragma unroll
            for (int i = 0; i < 3; ++i) wgmma_fence_operand(a[i]);
            wgmma_wait<0>();
            wgmma_fence_operand(total);
#pragma unroll
            for (int i = 0; i < 3; ++i) wgmma_fence_operand(a[i]);
            release(place.stage);
        }
    }
};

__device__ inline void consume_tiles(const Work &w, Barriers &barriers, ScaleOffset *grids, int tile, Range range) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = warp * 16 + lane / 4;
    const int low = GATED ? warp * 8 + lane / 4 : mine, high = GATED ? low + ROWS / 2 : mine + 8; // in a stage
    const int first = GROUPS > 1 ? range.begin * GROUPS : range.begin >> w.shift;
    const int last = (GROUPS > 1 ? min(range.end * GROUPS, w.groups) : ((range.end - 1) >> w.shift) + 1) - 1;
    stage_scales(w, grids, tile, first, last - first + 1);
    pdl_wait();
    pdl_launch_dependents();
    named_barrier_sync(1, MULTIPLIERS);
    Consumer consumer = {w, barriers, grids + low * w.pitch, grids + high * w.pitch, first, last};
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) consumer.total[i] = 0.0f;
    const u64 x = k_major_descriptor(shared_address(shared) + WEIGHTS, EIGHT_ROWS);
    const int mine_of_four = lane % 4 * (WIDTH / 4);
    const unsigned char *low_at = shared + low * WIDTH + mine_of_four, *high_at = shared + high * WIDTH + mine_of_four;
    consumer.pieces(range, low_at, high_at, x);
    if (SUMS) consumer.bases(range, x);
    named_barrier_sync(1, MULTIPLIERS); // nobody reads x any more
    float *results = reinterpret_cast<float *>(shared); // [BOX][PITCH]
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        results[token * PITCH + mine + (i % 4 >= 2 ? 8 : 0)] = consumer.total[i];
    }
}

// Sums of all blocks of the cluster, four of a row.
__device__ inline void summed(float (&sum)[4], const float *at, const u16 *bias, int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) {
        const float4 got = SPLIT > 1 ? of_rank(at, rank) : *reinterpret_cast<const float4 *>(at);
        sum[0] += got.x, sum[1] += got.y, sum[2] += got.z, sum[3] += got.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (bias) sum[i] += value(bias[column + i]);
}

// This block's rows of the output, all of the tile's columns, which are a multiple of 8.
__device__ inline void finish(const Work &w, int tile, int rank) {
    constexpr int SPAN = GATED ? ROWS / 2 : ROWS, FOURS = SPAN / 4, OWN = BOX / SPLIT;
    const float *results = reinterpret_cast<const float *>(shared);
    const int columns = GATED ? w.rows / 2 : w.rows;
    for (int i = threadIdx.x; i < OWN * FOURS; i += MULTIPLIERS) {
        const int token = rank * OWN + i / FOURS, own = i % FOURS * 4, column = tile * SPAN + own;
        if (token >= w.tokens || column >= columns) continue;
        const float *at = results + token * PITCH + (GATED ? own / 8 * 16 + own % 8 : own);
        float sum[4];
        summed(sum, at, w.bias, column);
        u16 result[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) result[j] = rounded(sum[j]);
        if (GATED) {
            summed(sum, at + 8, w.bias, column + columns);
#pragma unroll
            for (int j = 0; j < 4; ++j) result[j] = rounded(gated(value(result[j]), value(rounded(sum[j]))));
        }
        const uint2 four = {result[0] | static_cast<u32>(result[1]) << 16, result[2] | static_cast<u32>(result[3]) << 16};
        *reinterpret_cast<uint2 *>(w.out + static_cast<long long>(token) * columns + column) = four;
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(MULTIPLIERS + 32, 1)
    wq_gemm_pipelined(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
                const __grid_constant__ Work w) {
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    Barriers &barriers = *reinterpret_cast<Barriers *>(shared + STAGES * STAGE);
    ScaleOffset *grids = reinterpret_cast<ScaleOffset *>(shared + STAGES * STAGE + sizeof(Barriers)); // [ROWS][pitch]
    if (threadIdx.x == 0) {
        barriers.init(CONSUMERS * 4);
        fence_mbarrier_init();
        prefetch_tensor_map(x_map);
        prefetch_tensor_map(w_map);
    }
    __syncthreads();
    const Range range = range_of(w, rank);
    const bool multiplier = __shfl_sync(~0u, threadIdx.x / 128, 0) < CONSUMERS;
    if (multiplier) {
        consume_tiles(w, barriers, grids, tile, range);
    } else {
        if (threadIdx.x % 32 == 0) Producer{x_map, w_map, w, barriers, shared_address(shared), tile}.run(range);
        __syncwarp();
    }
    if (SPLIT > 1)
        cluster_sync();
    else if (multiplier)
        named_barrier_sync(1, MULTIPLIERS);
    if (multiplier) finish(w, tile, rank);
    if (SPLIT > 1) cluster_sync_relaxed(); // a block that ended could not be read
}

constexpr bool BY_PIECE = GROUPS > 1 || !SUMS;   // what a warp brings: a piece, or a group
constexpr int SUMMED = BY_PIECE ? 32 / GROUPS : 32; // lanes of a group's sum

struct PermuteWork {
    const u16 *x;
    u16 *to; // [tokens, pitch]: pieces of 128 columns, then sums in chunks of 64: of 16 groups, in three parts
    int tokens, columns, stride, pitch, pieces, groups, shift, units; // units: warps for a row
};
static_assert(sizeof(PermuteWork) == 48, "wq_gemm_pipelined.py packs 48 bytes");

// Where the first and third of four columns of x that lie side by side, a lane's, are in a piece; the others 8 further on.
//
// Slot 16 s + k is what the thread k % 8 / 2 of a quad has in byte 2 (k % 2) + k / 8 of its word s; of 4-bit weights word
// s / 2, where s % 2 are the upper halves of the bytes.
__device__ inline int slot_of(int lane) {
    if (BITS == 4) return (2 * (lane % 4) + lane / 4 % 2) * 16 + 2 * (lane / 8);
    if (GROUPS == 4) return (lane / 8 * 2 + lane % 2) * 16 + lane % 8 / 2 * 2;
    return (lane / 16 * 4 + lane % 4) * 16 + lane / 4 % 4 * 2;
}

// Brings x into the order of the products' slots, and adds up its groups.
extern "C" __global__ void __launch_bounds__(256) wq_permute_and_sum(const __grid_constant__ PermuteWork w) {
    pdl_launch_dependents(); // the products' blocks ask for weights and scales while this waits, too
    pdl_wait();
    const int lane = threadIdx.x % 32, at = blockIdx.x * 8 + threadIdx.x / 32;
    const int token = at / w.units, unit = at - token * w.units;
    if (token >= w.tokens) return;
    const u16 *row = w.x + static_cast<long long>(token) * w.stride;
    u16 *to = w.to + static_cast<long long>(token) * w.pitch;
    const int slot = slot_of(lane);
    float sum = 0.0f;
    if (unit < (BY_PIECE ? w.pieces : w.groups)) {
        const int begin = BY_PIECE ? unit : unit << w.shift, end = BY_PIECE ? unit + 1 : min(begin + (1 << w.shift), w.pieces);
        for (int piece = begin; piece < end; ++piece) {
            const int column = piece * COLUMNS + lane * 4;
            uint2 four = {0, 0};
            if (column < w.columns) four = *reinterpret_cast<const uint2 *>(row + column);
            sum += (value(four.x & 0xFFFF) + value(four.x >> 16)) + (value(four.y & 0xFFFF) + value(four.y >> 16));
            u32 *piece_to = reinterpret_cast<u32 *>(to + piece * COLUMNS + slot);
            piece_to[0] = __byte_perm(four.x, four.y, 0x5410);
            piece_to[4] = __byte_perm(four.x, four.y, 0x7632);
        }
    }
    if (!SUMS) return;
#pragma unroll
    for (int by = SUMMED / 2; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane % SUMMED == 0) {
        u32 parts[3];
        split_bf16x3(sum, 0.0f, parts[0], parts[1], parts[2]);
        const int group = unit * (32 / SUMMED) + lane / SUMMED;
        u16 *sums = to + w.pieces * COLUMNS + group / CHUNK * 64 + group % CHUNK;
#pragma unroll
        for (int i = 0; i < 3; ++i) sums[i * CHUNK] = parts[i] & 0xFFFF;
    }
}
