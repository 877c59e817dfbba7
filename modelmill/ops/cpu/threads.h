// Work shared over the threads of the OpenMP runtime that torch has loaded.
//
// The runtime is reached through function pointers (see runtime.cpp), not by linking: one pool of threads in the
// process, whichever compiler built this file, and a serial fallback where there is none.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace mill {

struct Pool {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
    int (*max_threads)();                                          // omp_get_max_threads
    int (*thread)();                                               // omp_get_thread_num
};
extern Pool pool;

inline int threads() { return pool.parallel ? pool.max_threads() : 1; }

// f(begin, end) over [0, items) in pieces of `step`. Each thread walks its own share from the start, so that what it
// prefetches is what it reads next, and then helps the others: a thread that the system has put aside delays nobody by
// more than a piece. Serial where `work` (bytes touched or operations) is too small to pay for waking the team.
constexpr int64_t kWorthTeam = 256 << 10;
constexpr int kMostShares = 64;

template <class F> struct Shared {
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const F* f;
    int64_t step;
    int count;
    Share shares[kMostShares];
    static void run(void* self) {
        auto& s = *static_cast<Shared*>(self);
        const int own = pool.thread();
        for (int i = 0; i < s.count; i++) {
            Share& share = s.shares[(own + i) % s.count];
            while (share.next.load(std::memory_order_relaxed) < share.end) {
                const int64_t at = share.next.fetch_add(s.step, std::memory_order_relaxed);
                if (at < share.end) (*s.f)(at, at + s.step < share.end ? at + s.step : share.end);
            }
        }
    }
};

template <class F> inline void share(int64_t items, int64_t step, int64_t work, const F& f) {
    if (step < 1) step = 1;
    const int team = work < kWorthTeam || items <= step ? 1 : threads();
    if (team <= 1) {
        if (items > 0) f(int64_t{0}, items);
        return;
    }
    Shared<F> shared;
    shared.f = &f;
    shared.step = step;
    shared.count = team < kMostShares ? team : kMostShares;
    const int64_t pieces = (items + step - 1) / step;
    for (int i = 0; i < shared.count; i++) {
        shared.shares[i].next.store(pieces * i / shared.count * step, std::memory_order_relaxed);
        const int64_t end = pieces * (i + 1) / shared.count * step;
        shared.shares[i].end = end < items ? end : items;
    }
    pool.parallel(&Shared<F>::run, &shared, static_cast<unsigned>(team), 0);
}

// Rows of a row-wise op: pieces of about 16 KiB.
template <class F> inline void share_rows(int64_t rows, int64_t row_bytes, const F& f) {
    const int64_t step = row_bytes > 0 ? (16 << 10) / row_bytes + 1 : 1;
    share(rows, step, rows * row_bytes, f);
}

// Memory that a thread keeps between calls, aligned for the widest vectors. Contents are not kept on growth.
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
