// Samples one token per row in fixed-point arithmetic, bit-identical to ops/sample.py.
//
// Computes: ids[M] of logits[M, vocab]: temperature, top-k, top-p, min-p
// Dtypes: logits float32; noise float64; integer probabilities
// Layout: row-major
// Range: any M
// Technique: integer arithmetic, thread pool
// Ops: sample
#if defined(__clang__)
#    pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#    pragma GCC optimize(                                                                          \
        "fp-contract=off")  // a fused multiply-add would change last bits, and so the ids
#endif
#include "common/parallel_for.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

namespace {

constexpr int kFixedPointBits = 40;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr int kSteps = 16, kBins = 60 * kSteps + 1;  // bins of a factor 2^(1/16) each
// for larger k the k-th largest is found by nth_element
constexpr int64_t kHeap = 2048;

struct RowSampling {
    float temperature;
    int32_t top_k;
    float top_p, min_p;
    double noise;
};

// log2 of a token's probability relative to the most likely one; monotonic in x.
inline float log2_share(float x, float max_logit) {
    const float z = (x == max_logit ? 0.0f : x - max_logit) * 1.4426950408889634f;
    return z < -60.0f ? -60.0f : z;
}

// 2^z as a 24-bit mantissa and a right shift from the position of 1.
inline void split_exp2(float z, int32_t& bits, int32_t& shift) {
    int32_t weights_scratch = static_cast<int32_t>(z);
    // z is negative: towards zero is up
    weights_scratch -= static_cast<float>(weights_scratch) > z;
    const float part = z - static_cast<float>(weights_scratch);
    float power = part * 0.0002161293086828664f;
    power = (power + 0.0012467841152101755f) * part;
    power = (power + 0.00967545248568058f) * part;
    power = (power + 0.055485282093286514f) * part;
    power = (power + 0.2402293086051941f) * part;
    power = (power + 0.6931470632553101f) * part;
    bits = static_cast<int32_t>((power + 1.0f) * 8388608.0f);
    shift = -weights_scratch;
}

inline int64_t shifted(int32_t bits, int32_t shift) {
    return static_cast<int64_t>(
        (static_cast<uint64_t>(static_cast<uint32_t>(bits)) << (kFixedPointBits - 23)) >> shift);
}

int64_t weight_of(float x, float max_logit) {
    int32_t bits, shift;
    split_exp2(log2_share(x, max_logit), bits, shift);
    return shifted(bits, shift);
}

void weights_of(const float* x, int64_t* w, int64_t count, float max_logit) {
    constexpr int64_t kBlock = 512;
    int32_t bits[kBlock], shift[kBlock];
    for (int64_t i = 0; i < count; i += kBlock) {
        const int64_t n = std::min(kBlock, count - i);
        for (int64_t j = 0; j < n; j++)
            split_exp2(log2_share(x[i + j], max_logit), bits[j], shift[j]);
        for (int64_t j = 0; j < n; j++) w[i + j] = shifted(bits[j], shift[j]);
    }
}

// NaN is ignored.
float max_of(const float* x, int64_t count) {
    constexpr int kLanes = 32;
    float lanes[kLanes], max_logit = kNegativeInfinity;
    for (float& lane : lanes) lane = kNegativeInfinity;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int j = 0; j < kLanes; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < count; i++) max_logit = x[i] > max_logit ? x[i] : max_logit;
    for (float lane : lanes) max_logit = lane > max_logit ? lane : max_logit;
    return max_logit;
}

float scaled(float* x, const float* logits, int64_t vocab, float temperature) {
    const float inv_temperature = 1.0f / temperature;
    for (int64_t i = 0; i < vocab; i++) {
        const float value = logits[i] * inv_temperature;
        x[i] = value == value ? value : kNegativeInfinity;
    }
    return max_of(x, vocab);
}

int64_t argmax(const float* logits, int64_t vocab) {
    const float max_logit = max_of(logits, vocab);
    constexpr int64_t kBlock = 256;
    for (int64_t i = 0; i < vocab; i += kBlock) {
        const int64_t end = std::min(i + kBlock, vocab);
        bool any = false;
        for (int64_t j = i; j < end; j++) any |= logits[j] == max_logit;
        if (!any) continue;
        for (int64_t j = i; j < end; j++)
            if (logits[j] == max_logit) return j;
    }
    return 0;
}

float kth_largest(const float* x, int64_t vocab, int64_t k, float* buffer) {
    if (k > kHeap) {
        std::memcpy(buffer, x, vocab * sizeof(float));
        std::nth_element(buffer, buffer + k - 1, buffer + vocab, std::greater<float>());
        return buffer[k - 1];
    }
    std::memcpy(buffer, x, k * sizeof(float));
    // min-heap of the k largest so far
    std::make_heap(buffer, buffer + k, std::greater<float>());
    constexpr int64_t kBlock = 64;
    for (int64_t i = k; i < vocab; i += kBlock) {
        const int64_t end = std::min(i + kBlock, vocab);
        const float least = buffer[0];
        bool any = false;
        for (int64_t j = i; j < end; j++) any |= x[j] > least;
        if (!any) continue;
        for (int64_t j = i; j < end; j++) {
            if (!(x[j] > buffer[0])) continue;
            std::pop_heap(buffer, buffer + k, std::greater<float>());
            buffer[k - 1] = x[j];
            std::push_heap(buffer, buffer + k, std::greater<float>());
        }
    }
    return buffer[0];
}

int64_t sum(const int64_t* w, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += w[i];
    return total;
}

int bin_of(float x, float max_logit) {
    return static_cast<int>(-log2_share(x, max_logit) * kSteps);
}

// Zeros the weights outside top-p: a histogram first, then an exact scan of the bin with the limit.
void apply_top_p(const float* x, int64_t* w, int64_t count, float max_logit, double p,
                 float* buffer) {
    const int64_t limit = static_cast<int64_t>(std::ceil(p * static_cast<double>(sum(w, count))));
    int64_t bins[kBins] = {};
    for (int64_t i = 0; i < count; i++) bins[bin_of(x[i], max_logit)] += w[i];
    int bin = 0;
    int64_t before = 0;
    while (bin < kBins - 1 && before + bins[bin] < limit) before += bins[bin++];
    int64_t members = 0;
    for (int64_t i = 0; i < count; i++)
        if (bin_of(x[i], max_logit) == bin) buffer[members++] = x[i];
    std::sort(buffer, buffer + members, std::greater<float>());
    float last = members ? buffer[0] : max_logit;
    for (int64_t i = 0; i < members && before < limit; i++) {
        if (buffer[i] != last) last = buffer[i];
        before += weight_of(last, max_logit);
    }
    int64_t above = 0;
    for (int64_t i = 0; i < count; i++) above += x[i] > last ? w[i] : 0;
    for (int64_t i = 0; i < count; i++) {
        if (x[i] > last) continue;
        if (x[i] == last && above < limit)
            above += w[i];
        else
            w[i] = 0;
    }
}

int64_t draw(const int64_t* w, int64_t count, double noise) {
    const int64_t total = sum(w, count);
    if (total <= 0) return 0;
    int64_t target = static_cast<int64_t>(noise * static_cast<double>(total));
    target = target < total - 1 ? target : total - 1;
    int64_t at = 0;
    constexpr int64_t kBlock = 256;
    for (; at + kBlock < count; at += kBlock) {
        const int64_t part = sum(w + at, kBlock);
        if (part > target) break;
        target -= part;
    }
    for (; at < count - 1 && w[at] <= target; at++) target -= w[at];
    return at;
}

int64_t sample_row(const float* logits, int64_t vocab, const RowSampling& params) {
    if (!(params.temperature > 0)) return argmax(logits, vocab);
    static thread_local mill::Scratch logits_scratch, buffer_scratch, weights_scratch, ids_scratch;
    float* x = logits_scratch.get<float>(vocab);
    const float max_logit = scaled(x, logits, vocab, params.temperature);
    if (max_logit == kNegativeInfinity) return 0;
    float* buffer = buffer_scratch.get<float>(vocab);
    int64_t count = vocab;
    int32_t* ids = nullptr;
    if (params.top_k > 0 && params.top_k < vocab) {
        const float kth = kth_largest(x, vocab, params.top_k, buffer);
        ids = ids_scratch.get<int32_t>(vocab);
        count = 0;
        for (int64_t i = 0; i < vocab; i++) {
            if (x[i] < kth) continue;
            ids[count] = static_cast<int32_t>(i);
            x[count++] = x[i];
        }
    }
    int64_t* w = weights_scratch.get<int64_t>(count);
    weights_of(x, w, count, max_logit);
    if (params.top_p < 1.0f) apply_top_p(x, w, count, max_logit, params.top_p, buffer);
    const int64_t least =
        static_cast<int64_t>(std::ceil(static_cast<double>(params.min_p) * 1099511627776.0));
    if (least > 0)
        for (int64_t i = 0; i < count; i++) w[i] = w[i] < least ? 0 : w[i];
    const int64_t at = draw(w, count, params.noise);
    return ids ? ids[at] : at;
}

}  // namespace

// logits: [rows, vocab] float32; all others [rows].
extern "C" void sample(int64_t* out, const float* logits, const float* temperature,
                       const int32_t* top_k, const float* top_p, const float* min_p,
                       const double* noise, int64_t rows, int64_t vocab) {
    mill::parallel_for(rows, 1, rows * vocab * 16, [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; r++)
            out[r] = sample_row(logits + r * vocab, vocab,
                                {temperature[r], top_k[r], top_p[r], min_p[r], noise[r]});
    });
}
