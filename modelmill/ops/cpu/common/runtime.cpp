// Self-check and bandwidth probe of the library.
//
// Computes: the checks that build.py runs after loading the library, and a plain parallel read: the
//     memory bandwidth against which the weight-streaming kernels are compared
// Range: any CPU
// Technique: SIMD (simd.h), thread pool
// Used by: build.py
#include "common/simd.h"
#include "common/parallel_for.h"

extern "C" int modelmill_vector_width() { return mill::W; }

// Returns 0, or the number of the first failed check (wrong compiler or CPU flags).
extern "C" int modelmill_self_check() {
    using namespace mill;
    float x[64], y[64];
    for (int i = 0; i < 64; i++) x[i] = static_cast<float>(i - 32) * 0.25f;
    vf total = zero();
    for (int i = 0; i < 64; i += W) total = add(total, load(x + i));
    if (sum(total) != -8.0f) return 1;
    for (int i = 0; i < 64; i += W) store(y + i, mill::exp(load(x + i)));
    for (int i = 0; i < 64; i++)
        if (std::fabs(y[i] / std::exp(x[i]) - 1.0f) > 1e-6f) return 2;
    bf16 b[W];
    f16 h[W];
    store(b, load_n(x + 1, W - 1));
    store(h, load_n(x + 1, W - 1));
    for (int i = 0; i < W; i++) {
        const float expected = i == W - 1 ? 0.0f : x[i + 1];  // quarters are exact in both
        if (to_float(b[i]) != expected || to_float(h[i]) != expected) return 3;
    }
    vf square[W];
    for (int i = 0; i < W; i++) square[i] = set1(static_cast<float>(i));
    transpose(square);
    for (int i = 0; i < W; i++) {
        store(y, square[i]);
        for (int j = 0; j < W; j++)
            if (y[j] != static_cast<float>(j)) return 4;
    }
    std::atomic<int64_t> covered{0};
    parallel_for(1000, 7, kMinParallelWork,
                 [&](int64_t from, int64_t to) { covered += to - from; });
    return covered == 1000 ? 0 : 5;
}

// Reads `bytes` with all threads and returns a checksum; used to measure the memory bandwidth.
extern "C" int64_t modelmill_read(const int64_t* data, int64_t bytes) {
    std::atomic<int64_t> total{0};
    mill::parallel_for(bytes / 8, 64 << 10, bytes, [&](int64_t from, int64_t to) {
        int64_t sums[32] = {};
        int64_t i = from;
        for (; i + 32 <= to; i += 32) {
            for (int line = 0; line < 32; line += 8)
                mill::prefetch(reinterpret_cast<const char*>(data + i + line) + 4096);
            for (int j = 0; j < 32; j++) sums[j] += data[i + j];
        }
        for (; i < to; i++) sums[0] += data[i];
        for (int j = 1; j < 32; j++) sums[0] += sums[j];
        total += sums[0];
    });
    return total;
}
