// Products of a few rows with 8-bit weights, at the speed of memory: y[t, n] = sum over groups of
// scale * (x . codes) + offset * (sum of x), for up to 8 * NT rows of x, in 16 bits.
//
// The four threads of a quad take a piece of two weight rows, a quarter each, 16 bytes at a time where a piece is 64 columns
// or 128, else 8. Of a word the bytes 0 and 2 become a pair of numbers, and 1 and 3 (dequant_int8.cuh); x comes in the same
// order, so that a quad's registers are, without a move between threads, the left operand of mma.m16n8k16 (mma.cuh). The
// sum of x, which the offsets need, is one more product, with ones in the place of the weights.
//
// Every warp has DEPTH pieces on their way before x may be read.
//
// Macros: those of weight_only.cuh, OFFSET (0: symmetric), PIECE (columns: 128, 64 or 32), BLOCKS.
#include "weight_only.cuh"
#include "dequant_int8.cuh"

constexpr int WORDS = PIECE / 16;                    // of a thread's quarter of a piece
constexpr int LOADS = WORDS == 2 ? 1 : WORDS / 4;    // that bring it, 64 columns apart
constexpr int EACH = WORDS / LOADS;                  // words of a load

struct Work {
    const u16 *x;
    const u32 *weight;
    const ScaleT *scale, *offset; // [N, groups]
    const u16 *bias;            // of x's type, or null
    u16 *out;
    int tokens, rows, columns, x_stride, groups; // columns: a multiple of 32
    int shift;                                   // pieces that share a scale, as a power of two
};
static_assert(sizeof(Work) == 72, "int8_gemm_small_m.py packs 72 bytes");

// Where this thread reads: its first load of the first piece of two weight rows, their scales, and its rows of x.
struct Place {
    const u32 *low, *high;
    const float2 *grid_low, *grid_high;
    const u16 *x[NT]; // null: no such row of x
    int column;       // its first one
};

// Two weight rows' part of a piece: a quarter of the columns each.
struct KTile {
    u32 low[WORDS], high[WORDS];
};

// Whether this thread's load of a piece lies in the matrix.
__device__ inline bool inside(const Work &w, const Place &at, int number, int load) {
    return PIECE == 32 || at.column + PIECE * number + 64 * load < w.columns;
}

__device__ inline void fetch(KTile &piece, const Work &w, const Place &at, int number) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
        u32 *low = piece.low + EACH * i, *high = piece.high + EACH * i;
        if (inside(w, at, number, i)) {
            fetch_words<EACH>(low, at.low + PIECE / 4 * number + 16 * i);
            fetch_words<EACH>(high, at.high + PIECE / 4 * number + 16 * i);
        } else {
#pragma unroll
            for (int j = 0; j < EACH; ++j) low[j] = high[j] = 0;
        }
    }
}

// total += this piece's part of 16 weight rows times up to 8 NT rows of x.
__device__ inline void add(float (&total)[NT][4], const KTile &piece, const Work &w, const Place &at, int number) {
    float part[NT][4] = {}, sums[NT][4] = {};
#pragma unroll
    for (int j = 0; j < WORDS; j += 2) {
        u32 low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int by = i % 2 * 8;
            low[i] = dequant_int8_pair(piece.low[j + i / 2] >> by), high[i] = dequant_int8_pair(piece.high[j + i / 2] >> by);
        }
        const int load = j / EACH;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            uint4 x = {0, 0, 0, 0}; // of the two words' columns
            const int column = PIECE * number + 64 * load + 4 * (j % EACH);
            if (at.x[n] && inside(w, at, number, load)) x = *reinterpret_cast<const uint4 *>(at.x[n] + column);
            const u32 even = __byte_perm(x.x, x.y, 0x5410), odd = __byte_perm(x.x, x.y, 0x7632);
            const u32 next_even = __byte_perm(x.z, x.w, 0x5410), next_odd = __byte_perm(x.z, x.w, 0x7632);
            multiply(part[n], low[0], high[0], low[1], high[1], even, odd);
            multiply(part[n], low[2], high[2], low[3], high[3], next_even, next_odd);
            if (OFFSET) {
                multiply(sums[n], ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, even, odd);
                multiply(sums[n], ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR, next_even, next_odd);
            }
        }
    }
    const int group = number >> w.shift;
    const float2 first = at.grid_low[group], second = at.grid_high[group];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            total[n][c] += first.x * part[n][c];
            total[n][2 + c] += second.x * part[n][2 + c];
            if (OFFSET) total[n][c] += first.y * sums[n][c], total[n][2 + c] += second.y * sums[n][c];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) int8_gemm_small_m(const __grid_constant__ Work w) {
    extern __shared__ __align__(16) unsigned char shared[];
    float2 *grids = reinterpret_cast<float2 *>(shared);
    const ThreadTile me = thread_tile(w.rows);
    Place at = {w.weight + me.low * (w.columns / 4) + me.place * EACH, w.weight + me.high * (w.columns / 4) + me.place * EACH,
                grids + me.mine * (w.groups + 1), grids + (me.mine + 8) * (w.groups + 1)};
    at.column = 4 * EACH * me.place;
    input_row_pointers(at.x, w.x + at.column, w.x_stride, me.quad, w.tokens);
    float total[NT][4] = {};
    pipelined_k_loop<KTile>(
        me.along_k, (w.columns + PIECE - 1) / PIECE, [&](KTile &piece, int number) { fetch(piece, w, at, number); },
        [&] {
            stage_scales(grids, w.scale, OFFSET ? w.offset : nullptr, nullptr, w.rows, w.groups);
            pdl_enter(w.tokens);
        },
        [&](const KTile &piece, int number) { add(total, piece, w, at, number); });
    finish(total, nullptr, w.bias, w.out, w.rows, w.tokens);
}
