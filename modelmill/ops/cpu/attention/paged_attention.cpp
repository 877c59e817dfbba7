// Attention over the paged KV cache, prefill and decode.
//
// Computes: out[T, heads · value_dim] = softmax(q[T, heads, dim] · Kᵀ · scale) · V per sequence,
//     causal, GQA, optional sliding window, soft cap, ALiBi, sinks; values may be the first
//     channels of the keys (MLA)
// Dtypes: q and out float32, bfloat16 or float16; pages the same types or int8 with float32 scales
// Layout: pages [pages, kv_heads, page_size, dim], contiguous; int32 page tables
// Range: any M; any head size and page size
// Technique: flash attention in blocks of queries, split-KV in parts of 256 keys (one query),
//     AVX-512 or AVX2 FMA, thread pool
// Ops: paged_attention, decode
//
// Prompts are split in blocks of queries (flash_attention.h); a single query is split in parts of
// 256 keys (split-KV, flash_attention_small_m.h) that are merged in a fixed order, so that a
// sequence gives the same bits alone and in a batch.
#include "attention/flash_attention_small_m.h"
#include "common/ops.h"

namespace {

// keys per part of a single query's context: fixed, so that the batch does not matter
constexpr int64_t kSplit = 256;
// query rows (queries x heads of one KV head) that share a tile of keys
constexpr int64_t kBlockRows = 96;

struct Task {
    int32_t sequence, kv_head, first, count;  // queries [first, first + count) of the sequence …
    // … or, for a single query split by context, the first key and its part
    int32_t key, part;
};

struct Call {
    const int32_t *tables, *starts, *contexts;
    int64_t sequences, heads, kv_heads, dim, value_dim, table_stride, window;
    float scale, softcap;
    const float *slopes, *sinks;  // of each head, or null
    int64_t group() const { return heads / kv_heads; }
    // what softmax's denominator has beside the keys, whose largest score is `highest`
    float sink(int64_t head, float highest) const {
        return sinks ? std::exp(sinks[head] - highest) : 0.0f;
    }
    int64_t queries(int64_t b) const { return starts[b + 1] - starts[b]; }
    int64_t first_visible(int64_t position) const {
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
};

int64_t block_queries(const Call& c) {
    return c.group() >= kBlockRows ? 1 : kBlockRows / c.group();
}

// Creates the tasks, later blocks of a prompt first (more keys). Returns their number; fills
// `tasks` unless it is null.
int64_t plan(const Call& c, Task* tasks, int64_t* parts) {
    int64_t count = 0;
    *parts = 0;
    const int64_t block = block_queries(c);
    for (int64_t b = 0; b < c.sequences; b++) {
        const int64_t queries = c.queries(b), context = c.contexts[b];
        if (queries <= 0 || context <= 0) continue;
        const int64_t begin = queries == 1 ? c.first_visible(context - 1) / kSplit * kSplit : 0;
        const int64_t chunks =
            queries == 1 ? (context - begin + kSplit - 1) / kSplit : (queries + block - 1) / block;
        for (int64_t chunk = chunks - 1; chunk >= 0; chunk--)
            for (int64_t h = 0; h < c.kv_heads; h++, count++) {
                const int64_t first = queries == 1 ? 0 : chunk * block;
                const int64_t part = queries == 1 && chunks > 1 ? (*parts)++ : -1;
                if (tasks)
                    tasks[count] = {
                        static_cast<int32_t>(b),
                        static_cast<int32_t>(h),
                        static_cast<int32_t>(first),
                        static_cast<int32_t>(queries - first < block ? queries - first : block),
                        static_cast<int32_t>(queries == 1 ? begin + chunk * kSplit : 0),
                        static_cast<int32_t>(part)};
            }
    }
    return count;
}

template <class T> void store_row(T* out, const float* sums, float total, int64_t dim) {
    const mill::vf inverse = mill::set1(1.0f / total);
    mill::for_each_vector(dim, [&](int64_t i, int n) {
        mill::put(out + i, mill::mul(mill::take(sums + i, n), inverse), n);
    });
}

// One task. partial: [parts][group][value_dim + 2] receives the sums, the maximum and the total of
// a split context.
template <class T, class C>
void run_task(const Call& c, const Task& task, T* out, const T* q, const mill::Pages<C>& pages,
              float* partial) {
    thread_local mill::Scratch scratch;
    const int64_t group = c.group(), rows = task.count * group, dim = c.dim;
    const int64_t value_dim = c.value_dim;
    const mill::Workspace w(scratch, rows, dim, value_dim);
    const int64_t context = c.contexts[task.sequence], start = context - c.queries(task.sequence);
    const auto token = [&](int64_t r) { return c.starts[task.sequence] + task.first + r / group; };
    const auto head_row = [&](int64_t r) {
        return token(r) * c.heads + task.kv_head * group + r % group;
    };
    for (int64_t r = 0; r < rows; r++)
        mill::for_each_vector(dim, [&](int64_t i, int n) {
            mill::store(w.q + r * w.width + i,
                        mill::mul(mill::take(q + head_row(r) * dim + i, n), mill::set1(c.scale)));
        });
    const bool single = c.queries(task.sequence) == 1;
    int64_t last = start + task.first + task.count, first = c.first_visible(start + task.first);
    if (single) {
        first = first > task.key ? first : task.key;
        last = last < task.key + kSplit ? last : task.key + kSplit;
    }
    const mill::KeyWindow window_keys{start + task.first,
                                      group,
                                      c.window,
                                      first,
                                      last,
                                      c.softcap,
                                      c.slopes ? c.slopes + task.kv_head * group : nullptr};
    // Only single queries use the small-M kernel: chunked prefill must not change a prompt's bits.
    const auto attend = single && rows <= mill::kSmallMRows ? mill::flash_attention_small_m<C>
                                                            : mill::flash_attention<C>;
    attend(w, rows, pages, c.tables + task.sequence * c.table_stride, task.kv_head, window_keys);
    for (int64_t r = 0; r < rows; r++) {
        const float* sums = w.out + r * w.value_stride;
        if (task.part < 0) {
            const float total =
                w.row_sum[r] + c.sink(task.kv_head * group + r % group, w.row_max[r]);
            store_row(out + head_row(r) * value_dim, sums, total, value_dim);
            continue;
        }
        float* part_out = partial + (task.part * group + r) * (value_dim + 2);
        std::memcpy(part_out, sums, static_cast<size_t>(value_dim) * sizeof(float));
        part_out[value_dim] = w.row_max[r];
        part_out[value_dim + 1] = w.row_sum[r];
    }
}

// Joins the parts of each split context, in a fixed order. The tasks of one sequence follow each
// other, part by part.
template <class T>
void join(const Call& c, const Task* tasks, int64_t count, T* out, const float* partial) {
    thread_local mill::Scratch scratch;
    const int64_t group = c.group(), dim = c.value_dim, size = dim + 2;
    float* sums = scratch.get<float>(dim);
    for (int64_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && tasks[end].sequence == tasks[i].sequence;) end++;
        if (tasks[i].part < 0) continue;
        for (int64_t row = 0; row < c.heads; row++) {
            const auto at = [&](int64_t t) {
                return partial + (tasks[t].part * group + row % group) * size;
            };
            float highest = -std::numeric_limits<float>::infinity(), total = 0.0f;
            for (int64_t t = i + row / group; t < end; t += c.kv_heads)
                highest = std::fmax(highest, at(t)[dim]);
            std::memset(sums, 0, static_cast<size_t>(dim) * sizeof(float));
            for (int64_t t = i + row / group; t < end; t += c.kv_heads) {
                const float factor = std::exp(at(t)[dim] - highest);
                total += at(t)[dim + 1] * factor;
                mill::for_each_vector(dim, [&](int64_t d, int n) {
                    mill::put(sums + d,
                              mill::fma(mill::take(at(t) + d, n), mill::set1(factor),
                                        mill::take(sums + d, n)),
                              n);
                });
            }
            total += c.sink(row, highest);
            store_row(out + (c.starts[tasks[i].sequence] * c.heads + row) * dim, sums, total, dim);
        }
    }
}

template <class T, class C>
void run(const Call& c, T* out, const T* q, const mill::Pages<C>& pages) {
    thread_local mill::Scratch plan_scratch, part_scratch;
    int64_t parts = 0, work = 0;
    const int64_t count = plan(c, nullptr, &parts);
    Task* tasks = plan_scratch.get<Task>(count + 1);
    plan(c, tasks, &parts);
    float* partial = part_scratch.get<float>(parts * c.group() * (c.value_dim + 2));
    for (int64_t b = 0; b < c.sequences; b++) {
        const int64_t size = c.queries(b) * c.heads * c.value_dim;
        work += c.queries(b) * c.heads * c.dim * c.contexts[b];
        if (c.contexts[b] <= 0 &&
            size > 0)  // padding: zeros, so that nothing downstream meets stray NaNs
            std::memset(static_cast<void*>(out + c.starts[b] * c.heads * c.value_dim), 0,
                        static_cast<size_t>(size) * sizeof(T));
    }
    mill::parallel_for(count, 1, work, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) run_task(c, tasks[i], out, q, pages, partial);
    });
    if (parts) join(c, tasks, count, out, partial);
}

}  // namespace

// Shapes as in ops/paged_attention.py; window and softcap 0 for none. The cache has its own dtype,
// or is of int8 where scales are given.
extern "C" void paged_attention(void* out, const void* q, const void* k_cache, const void* v_cache,
                                const int32_t* tables, const int32_t* starts,
                                const int32_t* contexts, const float* k_scale, const float* v_scale,
                                const float* slopes, const float* sinks, int64_t sequences,
                                int64_t heads, int64_t kv_heads, int64_t page_size, int64_t dim,
                                int64_t value_dim, int64_t table_stride, int64_t window,
                                double scale, double softcap, int dtype, int cache_dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(starts[sequences], dtype));
    const Call c{tables,
                 starts,
                 contexts,
                 sequences,
                 heads,
                 kv_heads,
                 dim,
                 value_dim,
                 table_stride,
                 window,
                 static_cast<float>(scale),
                 static_cast<float>(softcap),
                 slopes,
                 sinks};
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const auto run_with_cache = [&](auto* cache_type) {
            using C = std::remove_pointer_t<decltype(cache_type)>;
            const mill::Pages<C> pages{static_cast<const C*>(k_cache),
                                       static_cast<const C*>(v_cache),
                                       kv_heads,
                                       page_size,
                                       dim,
                                       value_dim,
                                       k_scale,
                                       v_scale};
            run(c, static_cast<T*>(out), static_cast<const T*>(q), pages);
        };
        if (k_scale)
            run_with_cache(static_cast<int8_t*>(nullptr));
        else
            mill::by_dtype(cache_dtype, run_with_cache);
    });
}
