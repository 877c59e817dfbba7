// The team of worker threads behind parallel_for.h.
//
// One word, the gate, holds the number of the job, whether it is open, and how many workers are inside. A worker enters
// only an open job that it has not seen; the caller closes the gate when no piece is left and waits for those inside:
// for a moment spinning, then asleep, since one that has lost its core may get the caller's.
// Where the caller waited longer for a worker than it computed itself, that worker had no core: for a while the team has
// one worker less. The while doubles as long as the next try meets the same, so that a core that another program keeps
// costs one such wait in hundreds of milliseconds, and one that is free again is used again.
// Between jobs workers spin for a moment, since the next job of a decode step comes within microseconds, and then sleep.
#include "parallel_for.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <climits>

namespace mill {
namespace {

constexpr uint64_t kOpen = 1u << 31, kInside = kOpen - 1;
constexpr int kTurns = 1000;      // pauses in which the caller looks for those inside to leave, before it sleeps
constexpr int64_t kSpin = 60000;  // nanoseconds that a worker looks for the next job before it sleeps
constexpr int64_t kStall = 200000;         // nanoseconds that the caller waits beyond its own time before it takes note
constexpr int64_t kShortestRest = 10000000, kLongestRest = 320000000;  // nanoseconds with a worker less

struct ThreadPool {
    alignas(64) std::atomic<uint64_t> gate;    // job number << 32 | open | workers inside
    alignas(64) std::atomic<uint32_t> signal;  // what sleeping workers wait on
    std::atomic<bool> sleeping;                // somebody does, or did and has not been woken since
    alignas(64) std::atomic<uint32_t> left;    // what a sleeping caller waits on
    std::atomic<bool> waiting;                 // it does
    alignas(64) std::atomic<bool> taken;       // by a caller
    void (*run)(void*, int);
    void* self;
    int limit;    // members of the open job
    int workers;  // started so far
    // Of the caller that holds the team:
    int resting;         // workers that are not called until rest_end
    int64_t rest, rest_end;
};
ThreadPool team;

// The OpenMP runtime that torch has loaded, reached through pointers; null where there is none.
thread_local int told = 0;  // by modelmill_set_num_threads; 0: as torch
int (*torch_threads)() = nullptr;                                             // omp_get_max_threads
void (*torch_parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;  // GOMP_parallel
int (*torch_member)() = nullptr;                                              // omp_get_thread_num
thread_local bool beside_torch = false;
bool torch_faster = true;  // with many rows of bfloat16

struct PoolTask {
    void (*run)(void*, int);
    void* self;
};
void run_pool_task(void* errand) {
    const PoolTask& e = *static_cast<const PoolTask*>(errand);
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
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else  // no futex: look again ten thousand times a second
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    const timespec moment{0, 100000};
    while (word.load() == value) nanosleep(&moment, nullptr);
}
void wake(std::atomic<uint32_t>&) {}
#endif

// Whether a job is open that the worker has not been in.
bool fresh(uint64_t gate, uint32_t seen) { return (gate & kOpen) && static_cast<uint32_t>(gate >> 32) != seen; }

void wait(uint32_t seen) {
    const int64_t until = now() + kSpin;
    do {
        for (int i = 0; i < 64; i++) {
            if (fresh(team.gate.load(std::memory_order_relaxed), seen)) return;
            pause();
        }
    } while (now() < until);
    const uint32_t signal = team.signal.load();
    team.sleeping.store(true);
    if (!fresh(team.gate.load(), seen)) sleep_while(team.signal, signal);
}

void* work(void* argument) {
    const int member = static_cast<int>(reinterpret_cast<intptr_t>(argument));
    uint32_t seen = 0;
    for (;;) {
        wait(seen);
        uint64_t gate = team.gate.load();
        while (fresh(gate, seen) && !team.gate.compare_exchange_weak(gate, gate + 1)) {}
        if (!fresh(gate, seen)) continue;
        seen = static_cast<uint32_t>(gate >> 32);
        if (member < team.limit) team.run(team.self, member);
        if (((team.gate.fetch_sub(1) - 1) & (kOpen | kInside)) == 0 && team.waiting.load()) {
            team.left.fetch_add(1);
            wake(team.left);
        }
    }
    return nullptr;
}

// Until nobody is inside the closed job. Returns nanoseconds that the caller slept for it.
int64_t wait_for_all() {
    for (int turns = 0; turns < kTurns; turns++) {
        if (!(team.gate.load(std::memory_order_acquire) & kInside)) return 0;
        pause();
    }
    const int64_t from = now();
    for (;;) {
        const uint32_t left = team.left.load();
        team.waiting.store(true);
        if (!(team.gate.load() & kInside)) break;
        sleep_while(team.left, left);
    }
    team.waiting.store(false);
    return now() - from;
}

// One worker less for a while: twice the last while where that has only just ended.
void rest(int members) {
    const int64_t time = now();
    const bool again = time < team.rest_end + team.rest;
    team.rest = !again ? kShortestRest : team.rest * 2 < kLongestRest ? team.rest * 2 : kLongestRest;
    team.rest_end = time + team.rest;
    if (team.resting < members - 1) team.resting++;
}

// In a forked child there are no workers; they are started again when they are needed.
void forget() {
    team.gate = 0;
    team.signal = 0;
    team.sleeping = false;
    team.waiting = false;
    team.taken = false;
    team.workers = 0;
    team.resting = 0;
}

// Workers up to `wanted` members; fewer where the system gives no more. The caller holds the team.
void start_workers(int wanted) {
    sigset_t every, before;  // signals are for the threads that Python knows
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (; team.workers + 1 < wanted; team.workers++) {
        pthread_t thread;
        const intptr_t member = team.workers + 1;
        if (pthread_create(&thread, &detached, work, reinterpret_cast<void*>(member))) break;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

int threads() {
    const int count = told ? told : torch_threads ? torch_threads() : 1;
    return count < kMaxThreads ? count : kMaxThreads;
}

bool torch_multiplies(int64_t rows, int dtype) { return torch_faster && dtype == 1 && rows > 16; }

UseTorchThreads::UseTorchThreads(bool on) { beside_torch = on && torch_parallel && torch_member; }
UseTorchThreads::~UseTorchThreads() { beside_torch = false; }

bool run_on_workers(void (*run)(void*, int), void* self, int members) {
    if (beside_torch) {
        PoolTask errand{run, self};
        torch_parallel(run_pool_task, &errand, static_cast<unsigned>(members), 0);
        return true;
    }
    if (team.taken.exchange(true, std::memory_order_acquire)) return false;
    const int64_t began = now();
    if (began >= team.rest_end) team.resting = 0;
    if (team.resting >= members - 1) {
        run(self, 0);
        team.taken.store(false, std::memory_order_release);
        return true;
    }
    members -= team.resting;
    if (team.workers + 1 < members) start_workers(members);
    team.run = run;
    team.self = self;
    team.limit = members;
    const uint64_t job = ((team.gate.load(std::memory_order_relaxed) >> 32) + 1) & 0xffffffffu;
    team.gate.store((job ? job : 1) << 32 | kOpen);
    if (team.sleeping.load() && team.sleeping.exchange(false)) {
        team.signal.fetch_add(1);
        wake(team.signal);
    }
    run(self, 0);
    team.gate.fetch_and(~kOpen);
    const int64_t slept = wait_for_all();
    if (slept > kStall && 2 * slept > now() - began) rest(members);
    team.taken.store(false, std::memory_order_release);
    return true;
}

}  // namespace mill

// How many threads the caller's thread may use from now on, whatever torch has been told; 0: as torch.
extern "C" void modelmill_set_num_threads(int64_t count) { mill::told = static_cast<int>(count); }

// Workers that are left out for now, because they had no core when they were called last.
extern "C" int modelmill_resting_workers() { return mill::team.resting; }

// Whether torch's products of many bfloat16 rows are faster than ours here (build.py decides).
extern "C" void modelmill_torch_multiplies(int yes) { mill::torch_faster = yes != 0; }

// Hands over omp_get_max_threads, GOMP_parallel and omp_get_thread_num of the OpenMP runtime in use, null for none:
// torch.set_num_threads decides for us too.
extern "C" void modelmill_threads(void* max_threads, void* parallel, void* member) {
    mill::torch_threads = reinterpret_cast<int (*)()>(max_threads);
    mill::torch_parallel = reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel);
    mill::torch_member = reinterpret_cast<int (*)()>(member);
    static const int registered = pthread_atfork(nullptr, nullptr, mill::forget);
    (void)registered;
}

#if defined(MILL_PORTABLE) && defined(__GLIBC__)
// Kernels that a wheel brings (prebuilt.py) run on systems older than the one that compiled them: pthreads by the symbols
// that every glibc has, and destructors of thread_local objects without libstdc++, which would ask for newer ones.
#if defined(__x86_64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.17");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.17");
#endif
extern "C" int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern "C" __attribute__((visibility("hidden"))) int __cxa_thread_atexit(void (*destroy)(void*), void* object,
                                                                         void* library) {
    return __cxa_thread_atexit_impl(destroy, object, library);
}
#endif
