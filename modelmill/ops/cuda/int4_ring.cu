// Products of 9 to 64 rows with 4-bit weights, groups of whole pieces of 128 columns: as int4_rows.cu, with everything on
// its way in shared memory, so that a multiplying warp has no load from memory outstanding when its products begin.
//
// One thread keeps STAGES pieces of K on their way, each 64 bytes of ROWS rows of the weight and 128 columns of x; the
// weights of the first leave before the kernel in front has ended. WORKERS warpgroups take 64 rows of the weight each,
// which are the left operand of wgmma, in registers. A thread reads a run of 32 columns of two rows, 16 bytes each, and
// uses it as it is: slots along K may stand for any columns, as long as x comes in the same order. ``ready`` has brought
// it into that order, a kernel in front that also adds up each group of x.
//
// A code c is put under the exponent of 128 and reads as 128 + c; in float16 c alone is the subnormal c / 2^24, which
// products take exactly. y = sum over groups of scale * part + base * (sum of x), base = offset - 128 * scale. The second
// term is a product of its own, with groups for columns: base and the sums are three bfloat16 each, the rest of what came
// before, and six of the nine pairs of them count.
//
// SPLIT blocks of a cluster share K, and add up in the first one's order at the end.
//
// Macros: BOX (rows of x, padded: 32, 64), WORKERS, SPLIT, STAGES, GATED (as narrow_weights.cuh), OFFSET (0: symmetric),
// HALF.
#include "cluster.cuh"
#include "numbers.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

#ifdef HALF
constexpr u32 UNDER = 0;
constexpr float UNIT = 16777216.0f, RAISED = 0.0f;
#else
constexpr u32 UNDER = 0x43004300u;
constexpr float UNIT = 1.0f, RAISED = 128.0f;
#endif
constexpr int ROWS = 64 * WORKERS, MULTIPLIERS = 128 * WORKERS, PITCH = ROWS + 4, COLUMNS = 128, CHUNK = 16;
constexpr u32 SLAB = BOX * 128, WEIGHTS = ROWS * 64, STAGE = WEIGHTS + 2 * SLAB; // a slab: 64 columns of x
static_assert(STAGES * STAGE >= BOX * PITCH * 4, "the sums find room where x was");
static_assert(BOX % SPLIT == 0, "each block of a cluster writes some rows of the output");

struct Work {
    const u16 *scale, *offset; // float16 [N, groups]
    const u16 *bias;           // of x's type, or null
    u16 *out;
    int tokens, rows, pieces, groups, shift, pitch; // shift: pieces of a group, as a power of two; pitch: of the grids
};
static_assert(sizeof(Work) == 56, "int4_ring.py packs 56 bytes");

typedef RingBarriers<STAGES> Barriers;

extern __shared__ __align__(1024) unsigned char shared[];

// Two bfloat16, whatever x is.
__device__ inline u32 brief(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// As wgmma.cuh's products with the left operand in registers, in bfloat16 whatever x is, added.
__device__ inline void multiply_brief(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
                 : HOLD_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ inline void multiply_brief(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NAMES_16
                 "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : HOLD_16(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// (word >> by) & 0x000F000F | UNDER in one instruction behind the shift: the compiler would take two.
__device__ inline u32 codes(u32 word, int by) {
    u32 both;
    asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(both) : "r"(word >> by), "r"(UNDER));
    return both;
}

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

__device__ inline Range range_of(int rank, int pieces, int shift) {
    const int each = (pieces + SPLIT - 1) / SPLIT, up = (1 << shift) - 1;
    Range r;
    r.begin = min(rank * each, pieces), r.end = min((rank + 1) * each, pieces);
    r.own = (r.begin + up) >> shift, r.owned = (r.end + up) >> shift;
    r.chunk = r.own / CHUNK, r.chunks = r.owned > r.own ? (r.owned - 1) / CHUNK - r.chunk + 1 : 0;
    return r;
}

struct Loader {
    const TensorMap &x_map, &w_map;
    const Work &work;
    Barriers &barriers;
    u32 base;
    int tile;

    __device__ u32 full(int stage) const { return shared_address(&barriers.full[stage]); }

    __device__ void weights(int stage, int number) const {
        const u32 target = base + stage * STAGE;
        arrive_expecting(full(stage), STAGE);
        if (GATED) {
            load_box(target, w_map, full(stage), number * 64, tile * (ROWS / 2));
            load_box(target + WEIGHTS / 2, w_map, full(stage), number * 64, work.rows / 2 + tile * (ROWS / 2));
        } else {
            load_box(target, w_map, full(stage), number * 64, tile * ROWS);
        }
    }

    __device__ void columns(int stage, int number) const {
        const u32 target = base + stage * STAGE + WEIGHTS;
        load_box(target, x_map, full(stage), number * COLUMNS, 0);
        load_box(target + SLAB, x_map, full(stage), number * COLUMNS + 64, 0);
    }

    __device__ void run(Range range) const {
        const int ahead = min(range.end - range.begin, STAGES);
        for (int i = 0; i < ahead; ++i) weights(i, range.begin + i);
        after_those_in_front();
        for (int i = 0; i < ahead; ++i) columns(i, range.begin + i);
        RingPlace<STAGES> place;
        for (int i = 0; i < ahead; ++i) place.advance();
        for (int number = range.begin + ahead; number < range.end; ++number, place.advance()) {
            wait(shared_address(&barriers.empty[place.stage]), place.parity ^ 1);
            weights(place.stage, number);
            columns(place.stage, number);
        }
        for (int chunk = 0; chunk < range.chunks; ++chunk, place.advance()) {
            wait(shared_address(&barriers.empty[place.stage]), place.parity ^ 1);
            arrive_expecting(full(place.stage), SLAB);
            load_box(base + place.stage * STAGE + WEIGHTS, x_map, full(place.stage),
                     work.pieces * COLUMNS + (range.chunk + chunk) * 64, 0);
        }
    }
};

// {scale, offset} of the block's rows and groups, two float16 in a word. A warp asks for all its rows' before it stores
// any: one after the other they took a third of the kernel's time.
__device__ inline void stage_grids(const Work &w, u32 *grids, int tile, int first, int count) {
    constexpr int WARPS = MULTIPLIERS / 32, EACH = ROWS / WARPS;
    const int warp = threadIdx.x / 32;
    for (int g = threadIdx.x % 32; g < count; g += 32) {
        u16 scale[EACH], offset[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = static_cast<long long>(row_of(tile, warp + i * WARPS, w.rows)) * w.groups + first + g;
            scale[i] = __ldg(w.scale + at);
            offset[i] = OFFSET ? __ldg(w.offset + at) : 0;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            grids[(warp + i * WARPS) * w.pitch + g] = scale[i] | static_cast<u32>(offset[i]) << 16;
    }
}

// The left operand of a piece's eight products, from one run of two rows.
struct Left {
    u32 a[8][4];

    __device__ void take(const unsigned char *low_at, const unsigned char *high_at) {
        const uint4 low = *reinterpret_cast<const uint4 *>(low_at), high = *reinterpret_cast<const uint4 *>(high_at);
        const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 l = lows[i / 2], h = highs[i / 2];
            const int by = i % 2 * 4;
            a[i][0] = codes(l, by), a[i][1] = codes(h, by), a[i][2] = codes(l, by + 8), a[i][3] = codes(h, by + 8);
        }
    }

    __device__ void hold() {
#pragma unroll
        for (int i = 0; i < 8; ++i) changed(a[i]);
    }

    __device__ void issue(float (&part)[BOX / 2], u64 x) {
        products_begin();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u64 right = x + (i / 4 * SLAB + i % 4 * 32) / 16; // descriptors count 16 bytes
            product(part, a[i][0], a[i][1], a[i][2], a[i][3], right, i > 0);
        }
        products_end();
    }
};

__device__ inline void flush(float (&total)[BOX / 2], const float (&part)[BOX / 2], u32 low_grid, u32 high_grid) {
    const float low = widened(low_grid & 0xFFFF) * UNIT, high = widened(high_grid & 0xFFFF) * UNIT;
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) total[i] = fmaf(i % 4 < 2 ? low : high, part[i], total[i]);
}

__device__ inline float base_of(u32 grid) {
    const float scale = widened(grid & 0xFFFF);
    return (OFFSET ? widened(grid >> 16) : -8.0f * scale) - RAISED * scale;
}

// Of two numbers three pairs of bfloat16 whose sum they are.
__device__ inline void parted(float low, float high, u32 &first, u32 &second, u32 &third) {
    first = brief(low, high);
    low -= __uint_as_float(first << 16), high -= __uint_as_float(first & 0xFFFF0000u);
    second = brief(low, high);
    third = brief(low - __uint_as_float(second << 16), high - __uint_as_float(second & 0xFFFF0000u));
}

struct Worker {
    const Work &w;
    Barriers &barriers;
    const u32 *low_grid, *high_grid; // of this thread's two rows
    int first;                       // group that lies first in them
    float total[BOX / 2];
    RingPlace<STAGES> place;

    __device__ u32 full() const { return shared_address(&barriers.full[place.stage]); }

    // This warp has read a stage.
    __device__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) arrive(shared_address(&barriers.empty[stage]));
    }

    // Of a piece: read before its products, which then have nothing to wait for behind them.
    __device__ uint2 grids(int number) const {
        const int group = (number >> w.shift) - first;
        return {low_grid[group], high_grid[group]};
    }

    __device__ void pieces(Range range, const unsigned char *low_at, const unsigned char *high_at, u64 x) {
        float part[BOX / 2];
        for (int number = range.begin; number < range.end; ++number) {
            const uint2 grid = grids(number);
            wait(full(), place.parity);
            Left left;
            left.take(low_at + place.stage * STAGE, high_at + place.stage * STAGE);
            left.issue(part, x + place.stage * (STAGE / 16));
            left.hold(); // they are read until the products have ended
            products_wait<0>();
            changed(part);
            left.hold();
            release(place.stage);
            place.advance();
            flush(total, part, grid.x, grid.y);
        }
    }

    // What the groups' bases take from the sums of x.
    __device__ void bases(Range range, u64 x) {
        const int lane = threadIdx.x % 4;
        for (int chunk = 0; chunk < range.chunks; ++chunk, place.advance()) {
            u32 a[3][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 *grid = i % 2 ? high_grid : low_grid;
                float pair[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int group = (range.chunk + chunk) * CHUNK + 2 * lane + j + (i >= 2 ? 8 : 0);
                    pair[j] = group >= range.own && group < range.owned ? base_of(grid[group - first]) : 0.0f;
                }
                parted(pair[0], pair[1], a[0][i], a[1][i], a[2][i]);
            }
            wait(full(), place.parity);
            const u64 sums = x + place.stage * (STAGE / 16);
            changed(total);
            products_begin();
#pragma unroll
            for (int i = 0; i < 3; ++i)
#pragma unroll
                for (int j = 0; j < 3 - i; ++j) multiply_brief(total, a[i], sums + j * 2);
            products_end();
#pragma unroll
            for (int i = 0; i < 3; ++i) changed(a[i]);
            products_wait<0>();
            changed(total);
#pragma unroll
            for (int i = 0; i < 3; ++i) changed(a[i]);
            release(place.stage);
        }
    }
};

__device__ inline void work_on(const Work &w, Barriers &barriers, u32 *grids, int tile, Range range) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = warp * 16 + lane / 4;
    const int low = GATED ? warp * 8 + lane / 4 : mine, high = GATED ? low + ROWS / 2 : mine + 8; // in a stage
    const int first = range.begin >> w.shift, count = ((range.end - 1) >> w.shift) - first + 1;
    stage_grids(w, grids, tile, first, count);
    after_those_in_front();
    let_next_in();
    meet(1, MULTIPLIERS);
    Worker worker = {w, barriers, grids + low * w.pitch, grids + high * w.pitch, first};
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) worker.total[i] = 0.0f;
    const u64 x = along_rows(shared_address(shared) + WEIGHTS, EIGHT_ROWS);
    const unsigned char *low_at = shared + low * 64 + lane % 4 * 16, *high_at = shared + high * 64 + lane % 4 * 16;
    worker.pieces(range, low_at, high_at, x);
    worker.bases(range, x);
    meet(1, MULTIPLIERS); // nobody reads x any more
    float *results = reinterpret_cast<float *>(shared); // [BOX][PITCH]
#pragma unroll
    for (int i = 0; i < BOX / 2; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        results[token * PITCH + mine + (i % 4 >= 2 ? 8 : 0)] = worker.total[i];
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
    constexpr int WIDE = GATED ? ROWS / 2 : ROWS, FOURS = WIDE / 4, EACH = BOX / SPLIT;
    const float *results = reinterpret_cast<const float *>(shared);
    const int columns = GATED ? w.rows / 2 : w.rows;
    for (int i = threadIdx.x; i < EACH * FOURS; i += MULTIPLIERS) {
        const int token = rank * EACH + i / FOURS, own = i % FOURS * 4, column = tile * WIDE + own;
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
    int4_ring(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map,
              const __grid_constant__ Work w) {
    const int rank = SPLIT > 1 ? cluster_rank() : 0, tile = blockIdx.x / SPLIT;
    Barriers &barriers = *reinterpret_cast<Barriers *>(shared + STAGES * STAGE);
    u32 *grids = reinterpret_cast<u32 *>(shared + STAGES * STAGE + sizeof(Barriers)); // [ROWS][pitch]
    if (threadIdx.x == 0) {
        barriers.init(WORKERS * 4);
        barriers_ready();
        prefetch_map(x_map);
        prefetch_map(w_map);
    }
    __syncthreads();
    const Range range = range_of(rank, w.pieces, w.shift);
    const bool multiplier = __shfl_sync(~0u, threadIdx.x / 128, 0) < WORKERS;
    if (multiplier) {
        work_on(w, barriers, grids, tile, range);
    } else {
        if (threadIdx.x % 32 == 0) Loader{x_map, w_map, w, barriers, shared_address(shared), tile}.run(range);
        __syncwarp();
    }
    if (SPLIT > 1)
        cluster_share();
    else if (multiplier)
        meet(1, MULTIPLIERS);
    if (multiplier) finish(w, tile, rank);
    if (SPLIT > 1) cluster_meet(); // a block that ended could not be read
}

struct Readying {
    const u16 *x;
    u16 *to; // [tokens, pitch]: pieces of 128 columns, then sums in chunks of 64: of 16 groups, in three parts
    int tokens, columns, stride, pitch, pieces, groups, shift, chunks;
};
static_assert(sizeof(Readying) == 48, "int4_ring.py packs 48 bytes");

// Brings x into the order of the products' slots, and adds up its groups; a warp for each of them in each row.
//
// Slot 16 s + k of a piece is what the thread k % 8 / 2 of a quad has in its word s / 2 (s % 2: upper halves of the bytes),
// in byte 2 (k % 2) + k / 8: four columns that lie side by side in x and in one lane here.
extern "C" __global__ void __launch_bounds__(256) int4_ready(const __grid_constant__ Readying w) {
    let_next_in(); // the products' blocks ask for weights and scales while this waits, too
    after_those_in_front();
    const int lane = threadIdx.x % 32, at = blockIdx.x * 8 + threadIdx.x / 32, all = w.chunks * CHUNK;
    const int token = at / all, g = at - token * all;
    if (token >= w.tokens) return;
    const u16 *row = w.x + static_cast<long long>(token) * w.stride;
    u16 *to = w.to + static_cast<long long>(token) * w.pitch;
    const int quad = lane / 8, slot = (2 * (lane % 4) + lane / 4 % 2) * 16 + 2 * quad;
    float sum = 0.0f;
    if (g < w.groups) {
        const int begin = g << w.shift, end = min(begin + (1 << w.shift), w.pieces);
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
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    if (lane == 0) {
        u32 parts[3];
        parted(sum, 0.0f, parts[0], parts[1], parts[2]);
        u16 *sums = to + w.pieces * COLUMNS + g / CHUNK * 64 + g % CHUNK;
#pragma unroll
        for (int i = 0; i < 3; ++i) sums[i * CHUNK] = parts[i] & 0xFFFF;
    }
}
