// One token for each row of logits, in whole numbers: see ops/sample.py, whose arithmetic this follows to the bit.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")  // a fused multiply-add would change last bits, and so the ids
#endif
#include "parallel_for.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

namespace {

constexpr int kOne = 40;
constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int kSteps = 16, kBins = 60 * kSteps + 1;  // of a factor 2^(1/16) each
constexpr int64_t kHeap = 2048;                      // beyond so many, the k-th largest is found by partitioning

struct RowSampling {
    float temperature;
    int32_t top_k;
    float top_p, min_p;
    double noise;
};

// The base-2 logarithm of a token's share of the likeliest one's; falls where x falls.
inline float depth(float x, float most) {
    const float z = (x == most ? 0.0f : x - most) * 1.4426950408889634f;
    return z < -60.0f ? -60.0f : z;
}

// Twenty-four bits of 2^z, and how far they have to be shifted down from the place where they weigh one.
inline void parts_of(float z, int32_t& bits, int32_t& shift) {
    int32_t whole = static_cast<int32_t>(z);
    whole -= static_cast<float>(whole) > z;  // z is negative: towards zero is up
    const float part = z - static_cast<float>(whole);
    float power = part * 0.0002161293086828664f;
    power = (power + 0.0012467841152101755f) * part;
    power = (power + 0.00967545248568058f) * part;
    power = (power + 0.055485282093286514f) * part;
    power = (power + 0.2402293086051941f) * part;
    power = (power + 0.6931470632553101f) * part;
    bits = static_cast<int32_t>((power + 1.0f) * 8388608.0f);
    shift = -whole;
}

inline int64_t shifted(int32_t bits, int32_t shift) {
    return static_cast<int64_t>((static_cast<uint64_t>(static_cast<uint32_t>(bits)) << (kOne - 23)) >> shift);
}

int64_t weight_of(float x, float most) {
    int32_t bits, shift;
    parts_of(depth(x, most), bits, shift);
    return shifted(bits, shift);
}

void weights_of(const float* x, int64_t* w, int64_t count, float most) {
    constexpr int64_t kBlock = 512;
    int32_t bits[kBlock], shift[kBlock];
    for (int64_t i = 0; i < count; i += kBlock) {
        const int64_t n = std::min(kBlock, count - i);
        for (int64_t j = 0; j < n; j++) parts_of(depth(x[i + j], most), bits[j], shift[j]);
        for (int64_t j = 0; j < n; j++) w[i + j] = shifted(bits[j], shift[j]);
    }
}

// NaN never counts.
float largest(const float* x, int64_t count) {
    constexpr int kLanes = 32;
    float lanes[kLanes], most = kNever;
    for (float& lane : lanes) lane = kNever;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int j = 0; j < kLanes; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    for (float lane : lanes) most = lane > most ? lane : most;
    return most;
}

float scaled(float* x, const float* logits, int64_t vocab, float temperature) {
    const float cold = 1.0f / temperature;
    for (int64_t i = 0; i < vocab; i++) {
        const float value = logits[i] * cold;
        x[i] = value == value ? value : kNever;
    }
    return largest(x, vocab);
}

int64_t likeliest(const float* logits, int64_t vocab) {
    const float most = largest(logits, vocab);
    constexpr int64_t kBlock = 256;
    for (int64_t i = 0; i < vocab; i += kBlock) {
        const int64_t end = std::min(i + kBlock, vocab);
        bool found = false;
        for (int64_t j = i; j < end; j++) found |= logits[j] == most;
        if (!found) continue;
        for (int64_t j = i; j < end; j++)
            if (logits[j] == most) return j;
    }
    return 0;
}

float kth_largest(const float* x, int64_t vocab, int64_t k, float* room) {
    if (k > kHeap) {
        std::memcpy(room, x, vocab * sizeof(float));
        std::nth_element(room, room + k - 1, room + vocab, std::greater<float>());
        return room[k - 1];
    }
    std::memcpy(room, x, k * sizeof(float));
    std::make_heap(room, room + k, std::greater<float>());  // the least of the k largest so far is in front
    constexpr int64_t kBlock = 64;
    for (int64_t i = k; i < vocab; i += kBlock) {
        const int64_t end = std::min(i + kBlock, vocab);
        const float least = room[0];
        bool found = false;
        for (int64_t j = i; j < end; j++) found |= x[j] > least;
        if (!found) continue;
        for (int64_t j = i; j < end; j++) {
            if (!(x[j] > room[0])) continue;
            std::pop_heap(room, room + k, std::greater<float>());
            room[k - 1] = x[j];
            std::push_heap(room, room + k, std::greater<float>());
        }
    }
    return room[0];
}

int64_t sum(const int64_t* w, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += w[i];
    return total;
}

int bin_of(float x, float most) { return static_cast<int>(-depth(x, most) * kSteps); }

// Clears what top-p removes: bins by depth first, then an exact walk through the one bin that the limit falls into.
void nucleus(const float* x, int64_t* w, int64_t count, float most, double p, float* room) {
    const int64_t limit = static_cast<int64_t>(std::ceil(p * static_cast<double>(sum(w, count))));
    int64_t bins[kBins] = {};
    for (int64_t i = 0; i < count; i++) bins[bin_of(x[i], most)] += w[i];
    int bin = 0;
    int64_t before = 0;
    while (bin < kBins - 1 && before + bins[bin] < limit) before += bins[bin++];
    int64_t members = 0;
    for (int64_t i = 0; i < count; i++)
        if (bin_of(x[i], most) == bin) room[members++] = x[i];
    std::sort(room, room + members, std::greater<float>());
    float last = members ? room[0] : most;
    for (int64_t i = 0; i < members && before < limit; i++) {
        if (room[i] != last) last = room[i];
        before += weight_of(last, most);
    }
    int64_t above = 0;
    for (int64_t i = 0; i < count; i++) above += x[i] > last ? w[i] : 0;
    for (int64_t i = 0; i < count; i++) {
        if (x[i] > last) continue;
        if (x[i] == last && above < limit) above += w[i];
        else w[i] = 0;
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

int64_t sample_row(const float* logits, int64_t vocab, const RowSampling& how) {
    if (!(how.temperature > 0)) return likeliest(logits, vocab);
    static thread_local mill::Scratch values, others, whole, places;
    float* x = values.get<float>(vocab);
    const float most = scaled(x, logits, vocab, how.temperature);
    if (most == kNever) return 0;
    float* room = others.get<float>(vocab);
    int64_t count = vocab;
    int32_t* ids = nullptr;
    if (how.top_k > 0 && how.top_k < vocab) {
        const float kth = kth_largest(x, vocab, how.top_k, room);
        ids = places.get<int32_t>(vocab);
        count = 0;
        for (int64_t i = 0; i < vocab; i++) {
            if (x[i] < kth) continue;
            ids[count] = static_cast<int32_t>(i);
            x[count++] = x[i];
        }
    }
    int64_t* w = whole.get<int64_t>(count);
    weights_of(x, w, count, most);
    if (how.top_p < 1.0f) nucleus(x, w, count, most, how.top_p, room);
    const int64_t least = static_cast<int64_t>(std::ceil(static_cast<double>(how.min_p) * 1099511627776.0));
    if (least > 0)
        for (int64_t i = 0; i < count; i++) w[i] = w[i] < least ? 0 : w[i];
    const int64_t at = draw(w, count, how.noise);
    return ids ? ids[at] : at;
}

}  // namespace

// logits: [rows, vocab] float32; all others [rows].
extern "C" void sample(int64_t* out, const float* logits, const float* temperature, const int32_t* top_k,
                       const float* top_p, const float* min_p, const double* noise, int64_t rows, int64_t vocab) {
    mill::share(rows, 1, rows * vocab * 16, [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; r++)
            out[r] = sample_row(logits + r * vocab, vocab, {temperature[r], top_k[r], top_p[r], min_p[r], noise[r]});
    });
}
