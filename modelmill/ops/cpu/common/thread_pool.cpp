// Thread pool behind parallel_for.h.
//
// Computes: worker threads that run one job of a caller at a time
// Range: any number of threads
// Technique: one atomic word, futex, work stealing, exponential backoff
// Used by: parallel_for.h
//
// One atomic word, the gate, holds the job number, whether it is open, and the number of workers
// inside. A worker enters only an open job that it has not run; the caller closes the gate when no
// chunk is left and waits for the workers inside: it spins briefly, then sleeps on a futex, since a
// descheduled worker may need the caller's core.
//
// If the caller waited longer for a worker than it computed itself, that worker had no core: the
// pool then skips one worker for a while (exponential backoff, 10 to 320 ms), so that a core
// occupied by another process costs one such wait per backoff period and is used again once it is
// free. Between jobs workers spin for 60 µs, since the next job of a decode step follows within
// microseconds, and then sleep.
#include "common/parallel_for.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#if defined(__linux__)
#    include <linux/futex.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

#include <climits>

namespace mill {
namespace {

constexpr uint64_t kOpen = 1u << 31, kInside = kOpen - 1;
constexpr int kSpinTurns = 1000;               // pauses that the caller spins before it sleeps
constexpr int64_t kSpinNanoseconds = 60000;    // a worker's spin time between jobs
constexpr int64_t kStallNanoseconds = 200000;  // caller's wait that triggers the backoff
// backoff time in nanoseconds
constexpr int64_t kMinBackoff = 10000000, kMaxBackoff = 320000000;

struct ThreadPool {
    alignas(64) std::atomic<uint64_t> gate;    // job number << 32 | open | workers inside
    alignas(64) std::atomic<uint32_t> signal;  // futex of sleeping workers
    // a worker sleeps, or slept and was not woken since
    std::atomic<bool> sleeping;
    alignas(64) std::atomic<uint32_t> done_signal;  // futex of a sleeping caller
    std::atomic<bool> waiting;                      // the caller sleeps
    alignas(64) std::atomic<bool> busy;             // a caller uses the pool
    void (*run)(void*, int);
    void* self;
    int limit;            // members of the open job
    int workers;          // started so far
                          // Owned by the current caller:
    int skipped_workers;  // workers that are skipped until backoff_end
    int64_t backoff, backoff_end;
};
ThreadPool pool;

// Entry points of torch's OpenMP runtime; null if it has none.
thread_local int thread_limit = 0;  // set by modelmill_set_num_threads; 0: as torch
// omp_get_max_threads
int (*torch_threads)() = nullptr;
void (*torch_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;  // GOMP_parallel
// omp_get_thread_num
int (*torch_member)() = nullptr;
thread_local bool use_torch = false;
bool torch_faster = true;  // with many rows of bfloat16

struct PoolTask {
    void (*run)(void*, int);
    void* self;
};
void run_pool_task(void* task_pointer) {
    const PoolTask& e = *static_cast<const PoolTask*>(task_pointer);
    e.run(e.self, torch_member());
}

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr,
            nullptr, 0);
}
void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
            nullptr, 0);
}
#else  // no futex: look again ten thousand times a second
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    const timespec moment{0, 100000};
    while (word.load() == value) nanosleep(&moment, nullptr);
}
void wake(std::atomic<uint32_t>&) {}
#endif

// Whether a job is open that this worker has not run.
bool is_new_job(uint64_t gate, uint32_t last_job) {
    return (gate & kOpen) && static_cast<uint32_t>(gate >> 32) != last_job;
}

void wait(uint32_t last_job) {
    const int64_t until = now() + kSpinNanoseconds;
    do {
        for (int i = 0; i < 64; i++) {
            if (is_new_job(pool.gate.load(std::memory_order_relaxed), last_job)) return;
            pause();
        }
    } while (now() < until);
    const uint32_t signal = pool.signal.load();
    pool.sleeping.store(true);
    if (!is_new_job(pool.gate.load(), last_job)) sleep_while(pool.signal, signal);
}

void* worker_main(void* argument) {
    const int member = static_cast<int>(reinterpret_cast<intptr_t>(argument));
    uint32_t last_job = 0;
    for (;;) {
        wait(last_job);
        uint64_t gate = pool.gate.load();
        while (is_new_job(gate, last_job) && !pool.gate.compare_exchange_weak(gate, gate + 1)) {
        }
        if (!is_new_job(gate, last_job)) continue;
        last_job = static_cast<uint32_t>(gate >> 32);
        if (member < pool.limit) pool.run(pool.self, member);
        if (((pool.gate.fetch_sub(1) - 1) & (kOpen | kInside)) == 0 && pool.waiting.load()) {
            pool.done_signal.fetch_add(1);
            wake(pool.done_signal);
        }
    }
    return nullptr;
}

// Waits until no worker is inside the closed job. Returns the nanoseconds slept.
int64_t wait_for_all() {
    for (int turns = 0; turns < kSpinTurns; turns++) {
        if (!(pool.gate.load(std::memory_order_acquire) & kInside)) return 0;
        pause();
    }
    const int64_t from = now();
    for (;;) {
        const uint32_t done_signal = pool.done_signal.load();
        pool.waiting.store(true);
        if (!(pool.gate.load() & kInside)) break;
        sleep_while(pool.done_signal, done_signal);
    }
    pool.waiting.store(false);
    return now() - from;
}

// Skips one more worker; doubles the backoff if the previous one has just ended.
void backoff(int members) {
    const int64_t time = now();
    const bool repeated = time < pool.backoff_end + pool.backoff;
    pool.backoff = !repeated                        ? kMinBackoff
                   : pool.backoff * 2 < kMaxBackoff ? pool.backoff * 2
                                                    : kMaxBackoff;
    pool.backoff_end = time + pool.backoff;
    if (pool.skipped_workers < members - 1) pool.skipped_workers++;
}

// After fork() the child has no workers; they are started again on demand.
void reset_after_fork() {
    pool.gate = 0;
    pool.signal = 0;
    pool.sleeping = false;
    pool.waiting = false;
    pool.busy = false;
    pool.workers = 0;
    pool.skipped_workers = 0;
}

// Starts workers up to `target` members, or as many as the system allows. The caller owns the pool.
void start_workers(int target) {
    sigset_t all_signals, previous_mask;  // signals are handled by Python's threads
    sigfillset(&all_signals);
    pthread_sigmask(SIG_SETMASK, &all_signals, &previous_mask);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (; pool.workers + 1 < target; pool.workers++) {
        pthread_t thread;
        const intptr_t member = pool.workers + 1;
        if (pthread_create(&thread, &detached, worker_main, reinterpret_cast<void*>(member))) break;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &previous_mask, nullptr);
}

}  // namespace

int threads() {
    const int count = thread_limit ? thread_limit : torch_threads ? torch_threads() : 1;
    return count < kMaxThreads ? count : kMaxThreads;
}

bool torch_multiplies(int64_t rows, int dtype) { return torch_faster && dtype == 1 && rows > 16; }

UseTorchThreads::UseTorchThreads(bool on) { use_torch = on && torch_parallel && torch_member; }
UseTorchThreads::~UseTorchThreads() { use_torch = false; }

bool run_on_workers(void (*run)(void*, int), void* self, int members) {
    if (use_torch) {
        PoolTask task_pointer{run, self};
        torch_parallel(run_pool_task, &task_pointer, static_cast<unsigned>(members), 0);
        return true;
    }
    if (pool.busy.exchange(true, std::memory_order_acquire)) return false;
    const int64_t began = now();
    if (began >= pool.backoff_end) pool.skipped_workers = 0;
    if (pool.skipped_workers >= members - 1) {
        run(self, 0);
        pool.busy.store(false, std::memory_order_release);
        return true;
    }
    members -= pool.skipped_workers;
    if (pool.workers + 1 < members) start_workers(members);
    pool.run = run;
    pool.self = self;
    pool.limit = members;
    const uint64_t job = ((pool.gate.load(std::memory_order_relaxed) >> 32) + 1) & 0xffffffffu;
    pool.gate.store((job ? job : 1) << 32 | kOpen);
    if (pool.sleeping.load() && pool.sleeping.exchange(false)) {
        pool.signal.fetch_add(1);
        wake(pool.signal);
    }
    run(self, 0);
    pool.gate.fetch_and(~kOpen);
    const int64_t slept = wait_for_all();
    if (slept > kStallNanoseconds && 2 * slept > now() - began) backoff(members);
    pool.busy.store(false, std::memory_order_release);
    return true;
}

}  // namespace mill

// Overrides the number of threads for calls of this thread; 0: as torch.set_num_threads.
extern "C" void modelmill_set_num_threads(int64_t count) {
    mill::thread_limit = static_cast<int>(count);
}

// Workers that are skipped for now (backoff).
extern "C" int modelmill_resting_workers() { return mill::pool.skipped_workers; }

// Whether torch's bfloat16 GEMMs of many rows are faster on this CPU (build.torch_gemm_is_faster).
extern "C" void modelmill_torch_multiplies(int yes) { mill::torch_faster = yes != 0; }

// Sets omp_get_max_threads, GOMP_parallel and omp_get_thread_num of the OpenMP runtime, or null, so
// that torch.set_num_threads applies to this pool too.
extern "C" void modelmill_threads(void* max_threads, void* parallel, void* member) {
    mill::torch_threads = reinterpret_cast<int (*)()>(max_threads);
    mill::torch_parallel =
        reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel);
    mill::torch_member = reinterpret_cast<int (*)()>(member);
    static const int registered = pthread_atfork(nullptr, nullptr, mill::reset_after_fork);
    (void)registered;
}

#if defined(MILL_PORTABLE) && defined(__GLIBC__)
// Prebuilt kernels of a wheel (prebuilt.py) must run on older systems than the build machine: bind
// pthreads to the oldest glibc symbol versions and avoid libstdc++ for thread_local destructors.
#    if defined(__x86_64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.2.5");
#    elif defined(__aarch64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.17");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.17");
#    endif
extern "C" int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern "C" __attribute__((visibility("hidden"))) int
__cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
    return __cxa_thread_atexit_impl(destroy, object, library);
}
#endif
