// Weight-only int4/int8 GEMM of a few rows (decode batches), bound by weight bandwidth.
//
// Computes: out[M, N] = x[M, K] · dequant(weight[N, K])ᵀ (+ bias[N]), M ≤ 8 · M_TILES; with GATED
//     SwiGLU of the two halves of N
// Dtypes: x and out bfloat16 or float16; weights int8 or packed int4; float16 group scales and
//     offsets (float32 scales of int8 weights without offsets); float32 sums
// Layout: row-major; packed codes as in ops/int4_linear.py; scales and offsets [N, groups]; weight
//     lines in shared memory (128-byte swizzle)
// Range: 2 ≤ M ≤ 16 (9 ≤ M where N · K < 2^22); N a multiple of 16, weight rows of a multiple of
//     128 bytes; of 9 rows and more K ≤ 8192
// Technique: TMA, mbarrier pipeline, warp specialization, mma.sync m16n8k16 with x in registers,
//     persistent blocks, split-K over a thread-block cluster (DSMEM), PDL
// Ops: int4_linear, int4_linear_swiglu, int8_linear, int8_linear_swiglu, int8_group_linear
//     (launched by wq_gemm_small_m.py)
//
// Persistent: SPLIT blocks of a cluster compute the same tiles of 16 weight rows and share K
// (split-K), so that a block reads only its part of x. A block goes over its tiles in steps of
// WARPS lines (128 bytes of each row), one for each consumer warp. A producer warp keeps STAGES
// steps in flight, the first ones before x is available (PDL); more delay the loads of x. The
// columns of x that a consumer multiplies stay in its registers for all tiles. If K is larger than
// the registers of a cluster hold, it goes over its tiles several times, with other columns in each
// pass. FINISHERS warps take turns: they add the consumers' sums of a tile and send them to the
// block that owns the tile (DSMEM), or add those of the other blocks and store the tile.
//
// The columns of a line are multiplied in parts that have one scale. In a part, each thread of a
// quad has WORDS adjacent words of two weight rows, which are the A fragments of mma.m16n8k16 as
// they lie: x is permuted along K in the same way, in registers. A 4-bit code is read as CODE_BASE
// + code (code_base.cuh); sum(x) of each part, needed for CODE_BASE and the offsets, is one more
// product with ones as A, once for all tiles.
//
// Macros: BITS (of a weight), PART_COLUMNS (4 bits: 128, 64 or 32; 8 bits: 64 or 32), M_TILES
// (tiles of 8 rows of x), LINES (lines of a consumer in a pass), WARPS (consumers), SPLIT, STAGES,
// GATED (eight rows of a tile are gate rows, the others the matching up rows), OFFSET (0:
// symmetric), SCALE_FP32 (scales are float32), VECTOR_SCALES (the scales of a line's parts are
// adjacent and aligned), HALF.
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "weight_only_gemm/code_base.cuh"
#include "weight_only_gemm/tile_scales.cuh"

constexpr int SLOTS = 4;      // tiles whose scales and sums are in shared memory
constexpr int FINISHERS = 2;  // warps
constexpr int ROWS = 16, LINE_COLUMNS = 1024 / BITS, PARTS = LINE_COLUMNS / PART_COLUMNS;
constexpr int PART_BYTES = PART_COLUMNS * BITS / 8, WORDS = PART_BYTES / 16;  // words of a thread
constexpr int MMAS = PART_COLUMNS / 16;
// independent sums of a part, so that a product does not wait for the one before
constexpr int CHAINS = M_TILES == 1 && MMAS > 1 ? 2 : 1;
constexpr u32 LINE_TILE_BYTES = ROWS * 128;
// floats from one row of x to the next in sums [rows of x][ROWS]: no bank conflicts
constexpr int PITCH = ROWS + 4;
constexpr u32 SUM_BYTES = 8 * M_TILES * PITCH * 4;
// symmetric int4 codes have zero-point 8; int8 has none
constexpr bool USES_SUMS = BITS == 4 || OFFSET;

struct Work {
    const u16* x;
    const ScaleT *scale, *offset;  // [N, groups]
    const u16* bias;               // [N] or null
    u16* out;
    int tokens, x_stride, rows, columns, groups;
    int shift;  // log2 of the parts that share a scale
    int tiles, lines, passes;
    int max_tiles;  // of a cluster
};
static_assert(sizeof(Work) == 80, "wq_gemm_small_m.py packs 80 bytes");

extern __shared__ __align__(1024) unsigned char shared[];

// scales: of a tile, and its slot is free; sums: of a tile, by all its consumers.
struct Barriers {
    u64 full[STAGES], empty[STAGES], scales[SLOTS], sums[SLOTS];
};

// Shared-memory layout in bytes: the pipeline, the sums of tiles in flight [SLOTS][WARPS], the
// barriers, then scales and offsets of tiles in flight; per tile the sums of earlier passes; per
// own tile the sums of the other blocks [SPLIT − 1] and their barriers.
constexpr u32 STEP_BYTES = WARPS * LINE_TILE_BYTES;
constexpr u32 SUMS_AT = STAGES * STEP_BYTES, BARRIERS_AT = SUMS_AT + SLOTS * WARPS * SUM_BYTES,
              SCALES_AT = BARRIERS_AT + sizeof(Barriers);
static_assert(sizeof(Barriers) % 16 == 0, "scales are copied in 16 bytes");

template <typename T> __device__ inline T& shared_at(u32 place) {
    return *reinterpret_cast<T*>(shared + place);
}

__device__ inline Barriers& barriers() { return shared_at<Barriers>(BARRIERS_AT); }

__device__ inline u32 scales_at(const Work& w, int slot) {
    return SCALES_AT + slot * tile_scale_bytes(w);
}

// Called by one thread.
__device__ inline void load_scales(const Work& w, int tile, int slot) {
    load_tile_scales(w, shared_address(shared) + scales_at(w, slot),
                     shared_address(&barriers().scales[slot]), tile);
}

// The tiles of a cluster: `count`, from `first` on, `stride` apart.
struct Tiles {
    int first, stride, count;
};

__device__ inline Tiles tiles_of(const Work& w) {
    const int first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
    return {first, stride, (w.tiles - first + stride - 1) / stride};
}

// Lines of a block: its part of a row's.
struct LineRange {
    int begin, end;
};

__device__ inline LineRange lines_of(const Work& w, int rank) {
    const int each = (w.lines + SPLIT - 1) / SPLIT;
    return {rank * each, min((rank + 1) * each, w.lines)};
}

// Of step, or tile, `number`: its stage, or slot, and the parity of its phase.
struct Stage {
    int index;
    u32 parity;
};

template <int COUNT> __device__ inline Stage stage_of(int number) {
    return {number % COUNT, static_cast<u32>(number / COUNT & 1)};
}

// Loads all steps, one thread. Lines past the block's are loaded too: x is zero there.
__device__ inline void load_weights(const TensorMap& map, const Work& w, int begin) {
    const Tiles tiles = tiles_of(w);
    int number = 0;
    for (int pass = 0; pass < w.passes; ++pass) {
        for (int i = 0; i < tiles.count; ++i) {
            const int tile = tiles.first + i * tiles.stride;
#pragma unroll 1
            for (int j = 0; j < LINES; ++j, ++number) {
                const int line = begin + (pass * LINES + j) * WARPS;
                const Stage stage = stage_of<STAGES>(number);
                const u32 full = shared_address(&barriers().full[stage.index]);
                mbarrier_wait(shared_address(&barriers().empty[stage.index]), stage.parity ^ 1);
                mbarrier_arrive_expect_tx(full, STEP_BYTES);
                const u32 target = shared_address(shared) + stage.index * STEP_BYTES;
                if (GATED) {
                    tma_load(target, map, full, 0, tile * 8, 0, line);  // gate and up rows
                } else {
                    tma_load(target, map, full, 0, tile * 16, line);
                }
            }
        }
    }
}

// Byte in a line's row of a thread's first word of a part.
__device__ inline constexpr int byte_of(int part, int quad_lane) {
    return part * PART_BYTES + quad_lane * WORDS * 4;
}

// Reads COUNT (2, 4 or 8) words of x, two columns each.
template <int COUNT> __device__ inline void read_x(u32* to, const u16* from) {
    if constexpr (COUNT == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        to[0] = two.x, to[1] = two.y;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(from)[i];
            to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z,
                   to[4 * i + 3] = four.w;
        }
    }
}

// The columns of a line of up to eight rows of x as B fragments, and their sum in each part: of
// rows 2 · (lane % 4) and the next.
struct InputLine {
    u32 b[PARTS][MMAS][2];
    float sums[PARTS][2];

    // row: of x, null past the last; columns past `end` are zero.
    __device__ void load(const u16* row, int line, int end, int quad_lane) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            // 4 bits: 16 bytes have 32 columns, the low nibbles the first half
            const int byte = byte_of(part, quad_lane);
            const int column =
                line * LINE_COLUMNS + (BITS == 4 ? byte / 16 * 32 + byte % 16 : byte);
            u32 near[2 * WORDS] = {}, far[2 * WORDS] = {};
            if (row && column < end) {
                read_x<2 * WORDS>(near, row + column);
                if (BITS == 4) read_x<2 * WORDS>(far, row + column + 16);
            }
#pragma unroll
            for (int i = 0; i < MMAS; ++i) {
                if (BITS == 4) {  // columns (0, 2) or (1, 3) of the word's four, near and far
                    const u32 pick = i % 2 ? 0x7632u : 0x5410u;
                    b[part][i][0] = __byte_perm(near[i / 2 * 2], near[i / 2 * 2 + 1], pick);
                    b[part][i][1] = __byte_perm(far[i / 2 * 2], far[i / 2 * 2 + 1], pick);
                } else {
                    b[part][i][0] = __byte_perm(near[2 * i], near[2 * i + 1], 0x5410u);
                    b[part][i][1] = __byte_perm(near[2 * i], near[2 * i + 1], 0x7632u);
                }
            }
        }
    }

    __device__ void add_up() {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            float d[4] = {};
#pragma unroll
            for (int i = 0; i < MMAS; ++i)
                mma(d, ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, b[part][i][0], b[part][i][1]);
            sums[part][0] = d[0], sums[part][1] = d[1];
        }
    }
};

// Reads COUNT (1, 2 or 4) adjacent words of shared memory.
template <int COUNT> __device__ inline void read_words(u32 (&to)[COUNT], u32 at) {
    if constexpr (COUNT == 4) {
        const uint4 four = shared_at<uint4>(at);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else if constexpr (COUNT == 2) {
        const uint2 two = shared_at<uint2>(at);
        to[0] = two.x, to[1] = two.y;
    } else {
        to[0] = shared_at<u32>(at);
    }
}

// A thread's words of a part of a weight row.
struct Words {
    u32 word[WORDS];

    __device__ void read(u32 at) { read_words(word, at); }

    // Two of the thread's four columns of product `i`.
    __device__ u32 pair(int i, bool second) const {
        if (BITS == 4) return code_pair(word[i / 2], i % 2 * 8 + second * 4);
        return dequant_int8_pair(second ? word[i] >> 8 : word[i]);
    }
};

struct Scales {
    float scale, base;  // base: what sum(x) is multiplied with
};

__device__ inline Scales scales_of(ScaleT scale_bits, ScaleT offset_bits) {
    const float scale = scale_to_float(scale_bits);
    const float offset =
        OFFSET ? scale_to_float(offset_bits) : (BITS == 4 ? -INT4_ZERO_POINT * scale : 0.0f);
    return {CODE_SCALE * scale, offset - CODE_BASE * scale};
}

// The scales, or offsets, of the parts of a line of one weight row.
struct LineScales {
    ScaleT part[PARTS];

    // row: place of the row's; line: its number.
    __device__ void read(const Work& w, u32 row, int line) {
        if constexpr (VECTOR_SCALES) {
            u32 words[PARTS / 2];
            read_words(words, row + min(line, w.lines - 1) * PARTS * sizeof(ScaleT));
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                part[i] = static_cast<ScaleT>(words[i / 2] >> i % 2 * 16);
        } else {
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                const int group = min((line * PARTS + i) >> w.shift, w.groups - 1);
                part[i] = shared_at<ScaleT>(row + group * sizeof(ScaleT));
            }
        }
    }
};

// A thread's rows of a tile are this one and that + 8: with the swizzle, reads have no bank
// conflicts.
__device__ inline int row_of(int quad) { return quad / 2 + quad % 2 * 4; }

// A thread's words of a line of two weight rows.
struct WeightLine {
    Words low[PARTS], high[PARTS];

    // at: of the line.
    __device__ void read(u32 at) {
        const int row = row_of(threadIdx.x % 32 / 4), quad_lane = threadIdx.x % 4;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const int byte = byte_of(part, quad_lane);
            const u32 place = at + row * 128 + ((byte / 16) ^ row) * 16 + byte % 16;
            low[part].read(place), high[part].read(place + 1024);
        }
    }
};

// Adds a line's products to `total`. grid: place of the tile's scales.
__device__ inline void multiply_line(float (&total)[M_TILES][4], const WeightLine& weight,
                                     const InputLine (&x)[M_TILES], const Work& w, u32 grid,
                                     int line) {
    const int row = row_of(threadIdx.x % 32 / 4);
    const u32 half = half_scale_bytes(w), own = grid + row * w.groups * sizeof(ScaleT);
    LineScales scales[2], offsets[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        scales[i].read(w, own + i * half, line);
        if (OFFSET) offsets[i].read(w, own + (2 + i) * half, line);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        float sum[M_TILES][CHAINS][4] = {};
#pragma unroll
        for (int i = 0; i < MMAS; ++i) {
            const Words &low = weight.low[part], &high = weight.high[part];
            const u32 a0 = low.pair(i, false), a1 = high.pair(i, false), a2 = low.pair(i, true),
                      a3 = high.pair(i, true);
#pragma unroll
            for (int n = 0; n < M_TILES; ++n)
                mma(sum[n][i % CHAINS], a0, a1, a2, a3, x[n].b[part][i][0], x[n].b[part][i][1]);
        }
        Scales rows[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            rows[i] = scales_of(scales[i].part[part], OFFSET ? offsets[i].part[part] : ScaleT(0));
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Scales& by = rows[i / 2];
                if (USES_SUMS) total[n][i] = fmaf(by.base, x[n].sums[part][i % 2], total[n][i]);
                float all = sum[n][0][i];
#pragma unroll
                for (int chain = 1; chain < CHAINS; ++chain) all += sum[n][chain][i];
                total[n][i] = fmaf(by.scale, all, total[n][i]);
            }
        }
    }
}

__device__ inline u32 sums_at(int slot, int warp) {
    return SUMS_AT + (slot * WARPS + warp) * SUM_BYTES;
}

// Publishes this consumer's sums of a tile.
__device__ inline void publish_sums(const float (&total)[M_TILES][4], int slot, int warp) {
    const int lane = threadIdx.x % 32;
    const u32 at = sums_at(slot, warp) + (lane % 4 * 2 * PITCH + row_of(lane / 4)) * 4;
#pragma unroll
    for (int i = 0; i < 4 * M_TILES; ++i)
        shared_at<float>(at + ((i / 4 * 8 + i % 2) * PITCH + i % 4 / 2 * 8) * 4) =
            total[i / 4][i % 4];
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&barriers().sums[slot]));
}

struct Four {
    float value[4];

    __device__ void add(u32 at) {
        const float4 four = shared_at<float4>(at);
        value[0] += four.x, value[1] += four.y, value[2] += four.z, value[3] += four.w;
    }

    // of the bias, from `row` on
    __device__ void add_bias(const u16* bias, int row) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (bias) value[i] += to_float(bias[row + i]);
    }

    __device__ void store(u32 at) const {
        shared_at<float4>(at) = {value[0], value[1], value[2], value[3]};
    }
};

// What a finisher adds for a tile, beside the sums of the consumers.
struct Finish {
    int tile, slot;
    u32 earlier;  // place of the sums of earlier passes; 0: none
    u32 peers;    // of those of the other blocks

    __device__ Four sum(u32 place) const {
        Four sum = {};
        if (earlier) sum.add(earlier + place);
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum.add(sums_at(slot, warp) + place);
        return sum;
    }

    __device__ Four total(u32 place) const {
        Four all = sum(place);
#pragma unroll
        for (int i = 0; i < SPLIT - 1; ++i) all.add(peers + i * SUM_BYTES + place);
        return all;
    }

    // Calls take(sum, place) for all sums of the tile.
    template <typename Take> __device__ void for_each(Take take) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
            const u32 place = ((n * 8 + lane / 4) * PITCH + lane % 4 * 4) * 4;
            take(sum(place), place);
        }
    }

    // Stores the tile's outputs.
    __device__ void store(const Work& w) const {
        constexpr int WIDTH = GATED ? 8 : 16, FOURS = WIDTH / 4;
        const int lane = threadIdx.x % 32, column = lane % FOURS * 4, row = tile * WIDTH + column;
        const int wide = GATED ? w.rows / 2 : w.rows;
#pragma unroll
        for (int first = 0; first < 8 * M_TILES; first += 32 / FOURS) {
            const int token = first + lane / FOURS;
            if (token >= w.tokens) return;
            const u32 place = (token * PITCH + column) * 4;
            Four sum = total(place);
            sum.add_bias(w.bias, row);
            u16 result[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) result[i] = rounded(sum.value[i]);
            if (GATED) {
                sum = total(place + 32);
                sum.add_bias(w.bias, row + wide);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    result[i] =
                        rounded(silu_mul(to_float(result[i]), to_float(rounded(sum.value[i]))));
            }
            *reinterpret_cast<uint2*>(w.out + static_cast<long long>(token) * wide +
                                      row) = {result[0] | static_cast<u32>(result[1]) << 16,
                                              result[2] | static_cast<u32>(result[3]) << 16};
        }
    }
};

// Places of the sums of earlier passes, of those of the other blocks, and of their barriers.
struct FinishLayout {
    u32 earlier, peers, barriers;
};

__device__ inline FinishLayout finish_layout(const Work& w) {
    const u32 earlier = scales_at(w, SLOTS),
              peers = earlier + (w.passes > 1 ? w.max_tiles * SUM_BYTES : 0),
              own = (w.max_tiles + SPLIT - 1) / SPLIT;
    return {earlier, peers, peers + own * (SPLIT - 1) * SUM_BYTES};
}

__device__ inline u32 peers_full(const FinishLayout& to, int own) {
    return shared_address(shared) + to.barriers + own * 8;
}

// By the lanes of one warp.
__device__ inline void load_first_scales(const Work& w) {
    const int lane = threadIdx.x % 32;
    const Tiles tiles = tiles_of(w);
    if (lane < min(SLOTS, tiles.count * w.passes))
        load_scales(w, tiles.first + lane % tiles.count * tiles.stride, lane);
    __syncwarp();
}

// One of the warps that add the consumers' sums, of the tiles `finisher`, + FINISHERS, …
__device__ inline void finish_tiles(const Work& w, int finisher, int rank) {
    const int lane = threadIdx.x % 32;
    const Tiles tiles = tiles_of(w);
    const FinishLayout layout = finish_layout(w);
    // a tile has the same finisher in all passes, which knows its earlier sums
    for (int pass = 0, i = finisher; pass < w.passes && i < tiles.count;) {
        const int number = pass * tiles.count + i, own = i / SPLIT, owner = i % SPLIT;
        const Stage slot = stage_of<SLOTS>(number);
        const u32 earlier = layout.earlier + i * SUM_BYTES,
                  peers = layout.peers + own * (SPLIT - 1) * SUM_BYTES;
        const Finish finish = {tiles.first + i * tiles.stride, slot.index, pass ? earlier : 0,
                               peers};
        mbarrier_wait(shared_address(&barriers().sums[slot.index]), slot.parity);
        if (pass < w.passes - 1) {
            finish.for_each([&](const Four& sum, u32 place) { sum.store(earlier + place); });
        } else if (SPLIT > 1 && owner != rank) {
            const u32 mine = shared_address(shared) + peers + (rank - (rank > owner)) * SUM_BYTES;
            finish.for_each([&](const Four& sum, u32 place) {
                dsmem_store_async(sum.value, mine + place, peers_full(layout, own), owner);
            });
        } else {
            if (SPLIT > 1) mbarrier_wait(peers_full(layout, own), 0);
            finish.store(w);
        }
        __syncwarp();
        const int then = number + SLOTS;  // takes this one's slot
        if (lane == 0 && then < tiles.count * w.passes)
            load_scales(w, tiles.first + then % tiles.count * tiles.stride, slot.index);
        i += FINISHERS;
        if (i >= tiles.count) i = finisher, ++pass;
    }
}

// Consumer warp `warp`.
__device__ inline void multiply_tiles(const Work& w, LineRange lines, int warp) {
    const int lane = threadIdx.x % 32, end = min(lines.end * LINE_COLUMNS, w.columns);
    const Tiles tiles = tiles_of(w);
    for (int pass = 0; pass < w.passes; ++pass) {
        const int first = lines.begin + pass * LINES * WARPS + warp;
        InputLine x[LINES][M_TILES];
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
#pragma unroll
            for (int n = 0; n < M_TILES; ++n) {
                const int token = lane / 4 + 8 * n;
                const u16* row = w.x + static_cast<long long>(token) * w.x_stride;
                x[i][n].load(token < w.tokens ? row : nullptr, first + i * WARPS, end, lane % 4);
            }
        }
        if (USES_SUMS) {
#pragma unroll
            for (int i = 0; i < LINES * M_TILES; ++i) x[i / M_TILES][i % M_TILES].add_up();
        }
        for (int i = 0; i < tiles.count; ++i) {
            const int number = pass * tiles.count + i;
            const Stage slot = stage_of<SLOTS>(number);
            mbarrier_wait(shared_address(&barriers().scales[slot.index]), slot.parity);
            float total[M_TILES][4] = {};
#pragma unroll
            for (int j = 0; j < LINES; ++j) {
                const Stage stage = stage_of<STAGES>(number * LINES + j);
                mbarrier_wait(shared_address(&barriers().full[stage.index]), stage.parity);
                WeightLine weight;
                weight.read(stage.index * STEP_BYTES + warp * LINE_TILE_BYTES);
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared_address(&barriers().empty[stage.index]));
                multiply_line(total, weight, x[j], w, scales_at(w, slot.index), first + j * WARPS);
            }
            publish_sums(total, slot.index, warp);
        }
    }
}

// By the lanes of one warp.
__device__ inline void init_barriers(const Work& w) {
    const int lane = threadIdx.x % 32;
    if (lane < STAGES) {
        mbarrier_init(shared_address(&barriers().full[lane]), 1);
        mbarrier_init(shared_address(&barriers().empty[lane]), WARPS);
    }
    if (lane < SLOTS) {
        mbarrier_init(shared_address(&barriers().scales[lane]), 1);
        mbarrier_init(shared_address(&barriers().sums[lane]), WARPS);
    }
    if (SPLIT > 1) {
        const FinishLayout layout = finish_layout(w);
        for (int own = lane; own < (w.max_tiles + SPLIT - 1) / SPLIT; own += 32) {
            mbarrier_init(peers_full(layout, own), 1);
            mbarrier_arrive_expect_tx(peers_full(layout, own),
                                      (SPLIT - 1) * ROWS * 8 * M_TILES * sizeof(float));
        }
    }
    fence_mbarrier_init();
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
    __launch_bounds__(32 * (WARPS + 1 + FINISHERS), 1)
        wq_gemm_small_m(const __grid_constant__ TensorMap map, const __grid_constant__ Work w) {
    pdl_launch_dependents();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int rank = SPLIT > 1 ? static_cast<int>(cluster_rank()) : 0;
    const LineRange lines = lines_of(w, rank);
    if (warp == WARPS) init_barriers(w);
    __syncthreads();
    if (SPLIT > 1) cluster_arrive_relaxed();
    if (warp == WARPS) {
        if (threadIdx.x % 32 == 0) load_weights(map, w, lines.begin);
    } else if (warp < WARPS) {
        pdl_wait();
        multiply_tiles(w, lines, warp);
    } else {
        if (warp == WARPS + 1) load_first_scales(w);
        if (SPLIT > 1) cluster_wait();  // the barriers of the other blocks
        pdl_wait();
        finish_tiles(w, warp - WARPS - 1, rank);
    }
}
