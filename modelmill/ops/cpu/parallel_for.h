// Work shared over a small team of threads of our own.
//
// An OpenMP team ends each parallel region at a barrier that waits for every member: where another process holds one
// core, each call then lasts as long as the system's slice of time. Here the caller never waits for a thread that has
// not come: it walks its own share, helps with the others', and waits only for pieces that somebody is inside of.
// See runtime.cpp for the team itself.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace mill {

constexpr int kMaxThreads = 64;

// How many threads a call may use, the caller among them: what torch has been told (torch.set_num_threads).
int threads();

// run(self, member) on the caller as member 0 and on up to `team` - 1 workers that come while the caller is busy;
// returns when all that came have left. False, and nothing done, where the team serves another caller.
bool run_on_workers(void (*run)(void*, int), void* self, int team);

// While one stands, this thread's calls use torch's own threads. Between products that torch computes its threads spin
// on the cores, and ours would only compete with them; the price is torch's barrier, which waits for everybody.
class UseTorchThreads {
  public:
    explicit UseTorchThreads(bool on);
    ~UseTorchThreads();
};
// Whether torch computes products of so many rows (ops/cpu/linear.py): of bfloat16, from 17 on, on some processors.
bool torch_multiplies(int64_t rows, int dtype);

// f(begin, end) over [0, items) in pieces of `step`. Each thread walks its own share from the start, so that what it
// prefetches is what it reads next, and then helps the others: a thread that the system has put aside delays nobody by
// more than a piece. Serial where `work` (bytes touched or operations) is too small to pay for calling the team.
constexpr int64_t kMinParallelWork = 64 << 10;

template <class F> struct Shared {
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const F* f;
    int64_t step;
    int count;
    Share shares[kMaxThreads];
    static void run(void* self, int own) {
        auto& s = *static_cast<Shared*>(self);
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
    const int team = work < kMinParallelWork || items <= step ? 1 : threads();
    if (team > 1) {
        Shared<F> shared;
        shared.f = &f;
        shared.step = step;
        shared.count = team;
        const int64_t pieces = (items + step - 1) / step;
        for (int i = 0; i < team; i++) {
            shared.shares[i].next.store(pieces * i / team * step, std::memory_order_relaxed);
            const int64_t end = pieces * (i + 1) / team * step;
            shared.shares[i].end = end < items ? end : items;
        }
        if (run_on_workers(&Shared<F>::run, &shared, team)) return;
    }
    if (items > 0) f(int64_t{0}, items);
}
// Rows of a row-wise op: pieces of about 16 KiB.
template <class F> inline void parallel_for_rows(int64_t rows, int64_t row_bytes, const F& f) {
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
