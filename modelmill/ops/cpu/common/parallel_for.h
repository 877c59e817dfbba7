// parallel_for over the library's own thread pool (thread_pool.cpp), and per-thread scratch memory.
//
// Computes: pieces of an index range on several threads, with work stealing
// Range: any range and grain
// Technique: work stealing, atomics
// Used by: add_rms_norm.cpp, block_floating_point.h, decode.cpp, flash_attention.h, gelu_tanh.cpp,
//     gemm_small_m.h, norm.h, quantize.cpp, rope_cache.cpp, rptq_linear.cpp, runtime.cpp,
//     sample.cpp, sigmoid_mul.cpp, silu_mul.cpp, state_rows.h, thread_pool.cpp, topk.h,
//     upsample_masks.cpp, w8a8_linear.cpp
//
// An OpenMP region ends at a barrier that waits for every thread: if another process occupies one
// core, each call lasts a scheduler time slice. Here the caller never waits for a worker that has
// not started: it processes its own range, steals from the others, and waits only for workers
// inside the job.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace mill {

constexpr int kMaxThreads = 64;

// Threads that a call may use, including the caller: torch.set_num_threads.
int threads();

// Runs run(self, member) on the caller (member 0) and on up to members − 1 workers that start while
// it is busy; returns when all of them have left. Returns false at once if the pool serves another
// caller.
bool run_on_workers(void (*run)(void*, int), void* self, int members);

// RAII: this thread's calls run on torch's OpenMP threads. Between torch's GEMMs these spin on the
// cores and a second pool would compete with them; the cost is OpenMP's barrier.
class UseTorchThreads {
  public:
    explicit UseTorchThreads(bool on);
    ~UseTorchThreads();
};
// Whether torch computes GEMMs of so many rows (ops/cpu/gemm_16bit/linear.py): bfloat16, 17 rows or
// more, some CPUs.
bool torch_multiplies(int64_t rows, int dtype);

// Calls f(begin, end) over [0, items) in chunks of `step`. Each thread processes its own range in
// order, so that prefetches hit, then steals chunks from the others: a descheduled thread delays
// the call by at most one chunk. Serial if `work` (bytes touched or operations) is below
// kMinParallelWork.
constexpr int64_t kMinParallelWork = 64 << 10;

template <class F> struct SharedWork {
    struct alignas(64) Range {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const F* f;
    int64_t step;
    int count;
    Range ranges[kMaxThreads];
    static void run(void* self, int member) {
        auto& s = *static_cast<SharedWork*>(self);
        for (int i = 0; i < s.count; i++) {
            Range& share = s.ranges[(member + i) % s.count];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                const int64_t at = share.next.fetch_add(s.step, std::memory_order_relaxed);
                if (at < share.end) (*s.f)(at, at + s.step < share.end ? at + s.step : share.end);
            }
        }
    }
};

template <class F> inline void parallel_for(int64_t items, int64_t step, int64_t work, const F& f) {
    if (step < 1) step = 1;
    const int members = work < kMinParallelWork || items <= step ? 1 : threads();
    if (members > 1) {
        SharedWork<F> shared_work;
        shared_work.f = &f;
        shared_work.step = step;
        shared_work.count = members;
        const int64_t chunks = (items + step - 1) / step;
        for (int i = 0; i < members; i++) {
            shared_work.ranges[i].next.store(chunks * i / members * step,
                                             std::memory_order_relaxed);
            const int64_t end = chunks * (i + 1) / members * step;
            shared_work.ranges[i].end = end < items ? end : items;
        }
        if (run_on_workers(&SharedWork<F>::run, &shared_work, members)) return;
    }
    if (items > 0) f(int64_t{0}, items);
}
// parallel_for over rows of a row-wise op, in chunks of about 16 KiB.
template <class F> inline void parallel_for_rows(int64_t rows, int64_t row_bytes, const F& f) {
    const int64_t step = row_bytes > 0 ? (16 << 10) / row_bytes + 1 : 1;
    parallel_for(rows, step, rows * row_bytes, f);
}

// Calls f(m, m_end, j, j_end) for the tiles of a GEMM's output [rows, n], up to block × step each.
// Tiles of the same rows come one after the other, so that their activations stay in the cache.
template <class F>
inline void parallel_for_tiles(int64_t rows, int64_t block, int64_t n, int64_t step, int64_t work,
                               const F& f) {
    const int64_t blocks = (rows + block - 1) / block, n_blocks = (n + step - 1) / step;
    parallel_for(blocks * n_blocks, 1, work, [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) {
            const int64_t m = i / n_blocks * block, j = i % n_blocks * step;
            f(m, m + block < rows ? m + block : rows, j, j + step < n ? j + step : n);
        }
    });
}

// Per-thread scratch memory kept between calls, 64-byte aligned. Growing discards the contents.
class Scratch {
  public:
    template <class T> T* get(int64_t count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 127) / 64 * 64;
        if (bytes > size_) {
            std::free(data_);
            data_ = std::aligned_alloc(64, bytes);
            if (!data_) std::abort();
            size_ = bytes;
        }
        return static_cast<T*>(data_);
    }
    ~Scratch() { std::free(data_); }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace mill
