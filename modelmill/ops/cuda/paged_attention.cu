// Prefill attention over the paged KV cache for Hopper, in the manner of FlashAttention-3 (Shah et al. 2024,
// arXiv:2407.08608).
//
// A block of threads is three warpgroups. One warp of the first, the producer, has the copy engine bring tiles of queries
// and blocks of keys and values into shared memory, page by page; the other two, the consumers, own 64 queries of the tile
// each. Everything between them is an mbarrier: "full" ends when bytes have landed, "empty" when all 8 consumer warps have
// read them. Each multiprocessor runs one block, which takes one tile of work after another until none is left; the
// producer fetches the next tile while the consumers still compute, so that nobody waits where tiles are short.
//
// What keeps the tensor cores busy, of which exponentials would otherwise take half the time:
//   * within a warpgroup, the scores of the next block and the mixture of the last one are products in flight while
//     the softmax of the block between them is computed;
//   * between the two warpgroups, named barriers keep them in turn: one issues products while the other is at its
//     softmax.
//
// The producer and the consumers have files of their own. Compile-time: DIM (64 or 128), PAGE (8 … 128), HALF (float16 instead
// of bfloat16).
#include "smem_pipeline.cuh"
#include "wgmma.cuh"

#ifndef DIM
#define DIM 128
#endif
#ifndef PAGE
#define PAGE 16
#endif

constexpr int QUERIES = 128;         // of a tile, 64 a consumer
constexpr int KEYS = 128;            // of a block
constexpr int HALVES = DIM / 64;     // columns of 128 bytes, the widest that the swizzle allows
constexpr int PAGES = KEYS / PAGE;   // of a block
constexpr int STAGES = 2;            // of every ring of buffers: a third of 96 KB would not fit
constexpr int MAX_SEQUENCES = 1024; // known to paged_attention.py
constexpr int THREADS = 384, CONSUMERS = 2, CONSUMER_WARPS = 8;
// Queries: all rows of the first half, then those of the second. Keys and values: both halves of 8 rows, then of the
// next 8, so that one request brings a whole page.
constexpr u32 Q_HALF = QUERIES * 128, K_ROWS = HALVES * EIGHT_ROWS;
constexpr u32 Q_BYTES = QUERIES * DIM * 2, BLOCK_BYTES = KEYS * DIM * 2, PAGE_BYTES = PAGE * DIM * 2;
constexpr int TURN = 1, CLEANED = TURN + CONSUMERS; // named barriers, one of each for each consumer
static_assert(PAGES <= 32 && PAGE >= 8, "a lane copies a page");

// Everything but the tensors' descriptors; paged_attention.py packs the same.
struct Work {
    const int *tables, *starts, *lengths;
    void *out;
    u32 *taken; // tiles that blocks have asked for, beyond their first, and blocks that have ended; both 0 between
                // launches. Null where no block needs a second tile.
    int batch, columns, table_stride, heads, group, pages, window, skip_single, heads_at_once;
    float scale; // of scores, times log2(e): exponentials are powers of two
};
static_assert(sizeof(Work) == 80, "paged_attention.py packs 80 bytes");

struct Tile {
    int row;      // of q and out where it begins; −1: no more work
    int rows;     // that exist
    int head;
    int position; // of its first query in the sequence
    int context;  // keys that exist
    int first, last; // blocks of keys that its queries see; last < first: none
};

// Not PipelineBarriers: the compiler then gives other registers, which nobody has measured.
struct Barriers {
    u64 q_full[STAGES], q_empty[STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

typedef PipelineState<STAGES> Place;

// What a block keeps beside the tiles. before[b]: tiles of the sequences in front of b.
struct TilePlan {
    Barriers barriers;
    Tile tiles[STAGES]; // beside the queries
    int before[MAX_SEQUENCES], start[MAX_SEQUENCES + 1], length[MAX_SEQUENCES];
};

extern __shared__ __align__(1024) unsigned char shared[];
constexpr u32 AT_K = STAGES * Q_BYTES, AT_V = AT_K + STAGES * BLOCK_BYTES, AT_PLAN = AT_V + STAGES * BLOCK_BYTES;
constexpr u32 PLAN_BYTES = 13 * 1024; // known to paged_attention.py, which asks for AT_PLAN + PLAN_BYTES
static_assert(sizeof(TilePlan) <= PLAN_BYTES, "the plan outgrows its place");

#include "paged_attention_producer.cuh"
#include "paged_attention_consumer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map, const __grid_constant__ Work work) {
    TilePlan &plan = *reinterpret_cast<TilePlan *>(shared + AT_PLAN);
    if (threadIdx.x == 0) {
        Barriers &barriers = plan.barriers;
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&barriers.q_full[i]), 1);
            mbarrier_init(shared_address(&barriers.q_empty[i]), CONSUMER_WARPS);
            mbarrier_init(shared_address(&barriers.k_full[i]), 1);
            mbarrier_init(shared_address(&barriers.k_empty[i]), CONSUMER_WARPS);
            mbarrier_init(shared_address(&barriers.v_full[i]), 1);
            mbarrier_init(shared_address(&barriers.v_empty[i]), CONSUMER_WARPS);
        }
        fence_mbarrier_init();
        prefetch_tensor_map(q_map);
        prefetch_tensor_map(k_map);
        prefetch_tensor_map(v_map);
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // The producer needs few registers, the consumers as many as there are: 40 + 2 · 232 = 3 · 168, what the block began with.
    if (group == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x < 32) load(q_map, k_map, v_map, work, plan, threadIdx.x);
    } else {
        setmaxnreg_inc<232>();
        consume(work, plan, group - 1);
    }
}
