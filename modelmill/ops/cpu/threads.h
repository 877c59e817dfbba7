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
};
extern Pool pool;

inline int threads() { return pool.parallel ? pool.max_threads() : 1; }

// f(begin, end) over [0, items) in pieces of `step`, taken by whichever thread is free. Serial where `work` (bytes
// touched or operations, whichever is larger) is too small to pay for waking the team.
constexpr int64_t kWorthTeam = 64 << 10;

template <class F> struct Shared {
    const F* f;
    std::atomic<int64_t> next;
    int64_t items, step;
    static void run(void* self) {
        auto& s = *static_cast<Shared*>(self);
        for (int64_t at; (at = s.next.fetch_add(s.step, std::memory_order_relaxed)) < s.items;)
            (*s.f)(at, at + s.step < s.items ? at + s.step : s.items);
    }
};

template <class F> inline void share(int64_t items, int64_t step, int64_t work, const F& f) {
    const int team = work < kWorthTeam || items <= step ? 1 : threads();
    if (team <= 1) {
        if (items > 0) f(int64_t{0}, items);
        return;
    }
    Shared<F> shared{&f, {0}, items, step < 1 ? 1 : step};
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
