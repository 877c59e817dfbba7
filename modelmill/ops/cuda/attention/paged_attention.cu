// Prefill attention over the paged KV cache (FlashAttention-3: Shah et al. 2024, arXiv:2407.08608).
//
// Computes: out[T, heads · DIM] = softmax(q[T, heads, DIM] · Kᵀ · scale) · V per sequence, causal,
//     optional sliding window, GQA
// Dtypes: q, KV pages and out bfloat16 or float16; float32 sums
// Layout: q and out row-major; K and V pages [pages, kv_heads, PAGE, DIM]; int32 page tables
// Range: prefill (more than 64 queries of a sequence and 128 of a step), 16-bit pages; DIM 64 or
//     128, PAGE 8 … 128 (a power of two), up to 1,024 sequences
// Technique: TMA, mbarrier pipelines, warp specialization, wgmma, pingpong named barriers,
//     setmaxnreg, PDL
// Ops: paged_attention (launched by paged_attention.py)
//
// Persistent and warp-specialized, one block per SM: one producer warp loads tiles of 128 queries
// and blocks of 128 keys and values by TMA, page by page; two consumer warpgroups own 64 queries
// each. Full and empty mbarriers connect them. The producer loads the next tile while the consumers
// finish the current one.
//
// Overlap of softmax (exponentials would take half the time) and tensor cores, as in
// FlashAttention-3: within a warpgroup the QKᵀ of the next block and the PV of the previous one are
// in flight during the softmax; between the two warpgroups named barriers alternate them
// (pingpong): one issues wgmma while the other computes its softmax.
//
// The producer is in paged_attention_producer.cuh, the consumers in paged_attention_consumer.cuh.
// Macros: DIM (64 or 128), PAGE (8 … 128), HALF (float16 instead of bfloat16).
#include "common/smem_pipeline.cuh"
#include "common/wgmma.cuh"

#ifndef DIM
#    define DIM 128
#endif
#ifndef PAGE
#    define PAGE 16
#endif

constexpr int QUERIES = 128;         // of a tile, 64 per consumer
constexpr int KEYS = 128;            // of a block
constexpr int HALVES = DIM / 64;     // columns of 128 bytes, the widest that the swizzle allows
constexpr int PAGES = KEYS / PAGE;   // of a block
constexpr int STAGES = 2;            // of every pipeline: a third stage of 96 KB does not fit
constexpr int MAX_SEQUENCES = 1024;  // as in paged_attention.py
constexpr int THREADS = 384, CONSUMERS = 2, CONSUMER_WARPS = 8;
// Queries: all rows of the first 64 columns, then of the second. Keys and values: both halves of 8
// rows, then of the next 8, so that one TMA copy loads a whole page.
constexpr u32 Q_HALF = QUERIES * 128, K_ROWS = HALVES * SWIZZLE_ATOM_BYTES;
constexpr u32 Q_BYTES = QUERIES * DIM * 2, BLOCK_BYTES = KEYS * DIM * 2,
              PAGE_BYTES = PAGE * DIM * 2;
// first named barriers of two per consumer
constexpr int PINGPONG_BARRIER = 1, ZEROED_BARRIER = PINGPONG_BARRIER + CONSUMERS;
static_assert(PAGES <= 32 && PAGE >= 8, "one lane loads one page");

// All parameters except the tensor maps; packed by paged_attention.py.
struct Work {
    const int *tables, *starts, *lengths;
    void* out;
    // tiles taken beyond each block's first, and exited blocks; both 0 between launches.
    u32* tile_counter;
    // Null if no block needs a second tile.
    int batch, columns, table_stride, heads, group, pages, window, skip_single, heads_per_pass;
    float scale;  // of scores, times log2(e): exponentials are powers of two
};
static_assert(sizeof(Work) == 80, "paged_attention.py packs 80 bytes");

struct Tile {
    int row;   // first row in q and out; −1: no more work
    int rows;  // valid rows
    int head;
    int position;     // of the first query in its sequence
    int context;      // keys of the sequence
    int first, last;  // key blocks that are visible to its queries; last < first: none
};

// Not PipelineBarriers, which changes the register allocation (not measured).
struct Barriers {
    u64 q_full[STAGES], q_empty[STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES],
        v_empty[STAGES];
};

typedef PipelineState<STAGES> State;

// Per-block schedule. first_tile[b]: number of tiles of the sequences before b.
struct TilePlan {
    Barriers barriers;
    Tile tiles[STAGES];  // one per query stage
    int first_tile[MAX_SEQUENCES], start[MAX_SEQUENCES + 1], length[MAX_SEQUENCES];
};

extern __shared__ __align__(1024) unsigned char shared[];
constexpr u32 AT_K = STAGES * Q_BYTES, AT_V = AT_K + STAGES * BLOCK_BYTES,
              AT_PLAN = AT_V + STAGES * BLOCK_BYTES;
// as in paged_attention.py, which allocates AT_PLAN + PLAN_BYTES
constexpr u32 PLAN_BYTES = 13 * 1024;
static_assert(sizeof(TilePlan) <= PLAN_BYTES, "the plan must fit PLAN_BYTES");

#include "attention/paged_attention_producer.cuh"
#include "attention/paged_attention_consumer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    prefill_attention(const __grid_constant__ TensorMap q_map,
                      const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map, const __grid_constant__ Work work) {
    TilePlan& plan = *reinterpret_cast<TilePlan*>(shared + AT_PLAN);
    if (threadIdx.x == 0) {
        Barriers& barriers = plan.barriers;
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
    // Registers move from the producer to the consumers: 40 + 2 · 232 = 3 · 168, the launch's
    // total.
    if (group == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x < 32) load(q_map, k_map, v_map, work, plan, threadIdx.x);
    } else {
        setmaxnreg_inc<232>();
        consume(work, plan, group - 1);
    }
}
