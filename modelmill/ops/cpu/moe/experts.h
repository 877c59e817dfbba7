// The experts of a mixture for few tokens: both products of all pairs in two calls of the pool.
//
// Computes: out[M, H] = Σ topk_weights · down(act(gate) · up) (+ shared), or down(relu²(up)) of
//     experts without a gate
// Dtypes: x and out float32, bfloat16 or float16; int8, int4 or e2m1 codes; float32 sums
// Layout: weights [E, N, row], the experts any number of bytes apart; scales and offsets
//     [E, N, groups]
// Range: any M, meant for few; H and I multiples of 32
// Technique: weight rows of an expert are read once for all its tokens, and two pool calls for all
//     experts
// Used by: int4_fused_moe.cpp, int8_fused_moe.cpp, mxfp4_fused_moe.cpp
//
// A token's experts are summed in the order of their numbers, each value by one thread, so that the
// bits depend neither on the number of threads nor on the batch.
#pragma once
#include "moe/expert_matrices.h"
#include "moe/expert_rows.h"
#include "norm_quantize/activation.h"

namespace mill {

// The matrix of one expert.
template <class Code>
Grouped<Code> matrix_of(const ExpertMatrices& stack, int64_t expert, int64_t group,
                        int scale_type) {
    const int64_t width = group ? group : stack.columns;
    return {stack.codes + expert * stack.codes_stride,
            stack.scale + expert * stack.scale_stride,
            stack.offset ? stack.offset + expert * stack.offset_stride : nullptr,
            scale_type,
            stack.columns / kPackColumns * Code::kBytes,
            (stack.columns + width - 1) / width,
            width / kPackColumns};
}

// A token and one of its experts.
struct Pair {
    int64_t expert, token;
    float weight;
};

// The pairs by expert, then by token; returns how many there are. An id that is no expert has none.
inline int64_t sort_pairs(Scratch& scratch, const ExpertsCall& call, Pair*& pairs) {
    const int64_t most = call.tokens * call.top_k;
    pairs = scratch.get<Pair>(most);
    int64_t count = 0;
    for (int64_t i = 0; i < most; i++) {
        const int64_t expert = call.topk_ids[i];
        if (expert < 0 || expert >= call.experts) continue;
        int64_t at = count++;
        for (; at > 0 && pairs[at - 1].expert > expert; at--) pairs[at] = pairs[at - 1];
        pairs[at] = {expert, i / call.top_k, call.topk_weights[i]};
    }
    return count;
}

// out[n] = act(gate) · up, each step rounded to T as the single ops do it; act(gate) alone for
// experts without a gate.
template <class T>
inline void gate_row(T* out, const T* gate, const T* up, int64_t n, int64_t act, float alpha,
                     float limit) {
    if (act == kSilu) return silu_mul_row(out, gate, up, n);
    if (act == kGeluTanh) {
        gelu_tanh_row(out, gate, n);
        for_each_vector(
            n, [&](int64_t i, int c) { put(out + i, mul(take(out + i, c), take(up + i, c)), c); });
        return;
    }
    if (act == kRelu2) {
        for_each_vector(n, [&](int64_t i, int c) {
            const vf positive = max(zero(), take(gate + i, c));
            put(out + i, mul(positive, positive), c);
        });
        return;
    }
    const vf most = set1(limit), least = set1(-limit), slope = set1(alpha), one = set1(1.0f);
    for_each_vector(n, [&](int64_t i, int c) {
        const vf g = min(most, take(gate + i, c));
        const vf u = max(least, min(most, take(up + i, c)));
        put(out + i, mul(add(u, one), sigmoid_times(g, mul(g, slope))), c);
    });
}

// out[n] = sums (+ bias), rounded to T.
template <class T> inline void put_rounded(T* out, const float* sums, const T* bias, int64_t n) {
    for_each_vector(n, [&](int64_t i, int c) {
        const vf value = take(sums + i, c);
        put(out + i, bias ? add(value, take(bias + i, c)) : value, c);
    });
}

// Weight rows, in whole eights, that a thread takes at once of an expert's `rows`.
inline int64_t rows_at_once(int64_t rows, int64_t row_bytes, int64_t bytes) {
    const int64_t share = rows / 16, fitting = bytes / (row_bytes > 0 ? row_bytes : 1);
    return ((share < fitting ? share : fitting) / 8 + (share < 8 || fitting < 8)) * 8;
}

// The last of the pairs from `first` on that have the same expert, and one.
inline int64_t end_of_expert(const Pair* pairs, int64_t first, int64_t count) {
    int64_t end = first + 1;
    while (end < count && pairs[end].expert == pairs[first].expert) end++;
    return end;
}

// inner[pairs, I] = act(gate) · up, or act(up), for x as `rows` holds it.
template <class Code, class T>
void multiply_gate_up(T* inner, const ExpertRows<Code, T>& rows, const ExpertsCall& call,
                      const Pair* pairs, int64_t count, int scale_type, float alpha, float limit) {
    constexpr int64_t kChunkBytes = 32 << 10;
    const bool gated = call.gate != kRelu2;
    const int64_t halves = gated ? 2 : 1, width = call.gate_up.rows / halves;
    const Grouped<Code> first = matrix_of<Code>(call.gate_up, 0, call.group, scale_type);
    const int64_t step = rows_at_once(width, first.bytes, kChunkBytes),
                  chunks = (width + step - 1) / step;
    thread_local Scratch start_scratch;
    int64_t* starts = start_scratch.get<int64_t>(count + 1);
    int64_t used = 0;
    for (int64_t at = 0; at < count; at = end_of_expert(pairs, at, count)) starts[used++] = at;
    starts[used] = count;
    const auto end_of = [=](int64_t from) { return from + step < width ? from + step : width; };
    const auto chunk = [&](int64_t begin, int64_t end, int64_t from, const NextRows& next) {
        thread_local Scratch scratch, value_scratch;
        const int64_t to = end_of(from), n = to - from, expert = pairs[begin].expert;
        float* sums = scratch.get<float>(n);
        T* gate = value_scratch.get<T>(2 * n);
        T* up = gate + n;
        const Grouped<Code> w = matrix_of<Code>(call.gate_up, expert, call.group, scale_type);
        const T* bias = static_cast<const T*>(call.gate_up.bias);
        if (bias) bias += expert * halves * width;
        for (int64_t i = begin; i < end; i++) {
            rows.multiply(sums, pairs[i].token, w, from, to,
                          gated ? next_rows(w, width + from, width + to) : next);
            put_rounded(gate, sums, bias ? bias + from : nullptr, n);
            if (gated) {
                rows.multiply(sums, pairs[i].token, w, width + from, width + to, next);
                put_rounded(up, sums, bias ? bias + width + from : nullptr, n);
            }
            gate_row(inner + i * width + from, gate, up, n, call.gate, alpha, limit);
        }
    };
    parallel_for(
        used * chunks, 1, used * halves * width * first.bytes, [&](int64_t item, int64_t last) {
            for (; item < last; item++) {
                const int64_t e = item / chunks, from = item % chunks * step;
                NextRows next;
                if (item + 1 < used * chunks) {
                    const int64_t start = (item + 1) % chunks * step,
                                  expert = pairs[starts[(item + 1) / chunks]].expert;
                    next = next_rows(matrix_of<Code>(call.gate_up, expert, call.group, scale_type),
                                     start, end_of(start));
                }
                chunk(starts[e], starts[e + 1], from, next);
            }
        });
}

// out[M, H] = Σ weight · down (+ shared) for the pairs' inner values as `rows` holds them.
template <class Code, class T>
void multiply_down(const ExpertRows<Code, T>& rows, const ExpertsCall& call, const Pair* pairs,
                   int64_t count, int scale_type) {
    constexpr int64_t kChunkBytes = 24 << 10;
    const int64_t hidden = call.down.rows;
    const Grouped<Code> first = matrix_of<Code>(call.down, 0, call.group, scale_type);
    const int64_t step = rows_at_once(hidden, first.bytes, kChunkBytes);
    const auto chunk = [&](int64_t from, int64_t to) {
        thread_local Scratch scratch, value_scratch;
        const int64_t n = to - from;
        float* totals = scratch.get<float>((call.tokens + 1) * n);
        float* sums = totals + call.tokens * n;
        T* value = value_scratch.get<T>(n);
        std::memset(totals, 0, static_cast<size_t>(call.tokens * n) * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            const Pair& pair = pairs[i];
            const Grouped<Code> w = matrix_of<Code>(call.down, pair.expert, call.group, scale_type);
            const bool more = i + 1 < count;  // else the next rows of the first expert
            const int64_t start = more ? from : to, end = more ? to : to + n;
            NextRows next;
            if (end <= hidden)
                next = next_rows(matrix_of<Code>(call.down, pairs[more ? i + 1 : 0].expert,
                                                 call.group, scale_type),
                                 start, end);
            rows.multiply(sums, i, w, from, to, next);
            const T* bias = static_cast<const T*>(call.down.bias);
            put_rounded(value, sums, bias ? bias + pair.expert * hidden + from : nullptr, n);
            float* total = totals + pair.token * n;
            const vf weight = set1(pair.weight);
            for_each_vector(n, [&](int64_t j, int c) {
                put(total + j, fma(take(value + j, c), weight, take(total + j, c)), c);
            });
        }
        const T* shared = static_cast<const T*>(call.shared);
        for (int64_t t = 0; t < call.tokens; t++)
            put_rounded(static_cast<T*>(call.out) + t * hidden + from, totals + t * n,
                        shared ? shared + t * hidden + from : nullptr, n);
    };
    parallel_for(hidden, step, (count + 1) * hidden * first.bytes, [&](int64_t from, int64_t to) {
        for (; from < to; from += step) chunk(from, from + step < to ? from + step : to);
    });
}

// The whole op.
template <class Code>
void multiply_experts(const ExpertsCall& call, double alpha, double limit, int dtype,
                      int scale_type) {
    by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        thread_local Scratch scratch, inner_scratch, rows_scratch, inner_rows_scratch;
        ExpertRows<Code, T> input, activated;
        Pair* pairs;
        const int64_t count = sort_pairs(scratch, call, pairs), width = call.down.columns;
        T* inner = inner_scratch.get<T>(count * width);
        input.pack(rows_scratch, static_cast<const T*>(call.x), call.tokens, call.gate_up.columns,
                   matrix_of<Code>(call.gate_up, 0, call.group, scale_type));
        multiply_gate_up<Code, T>(inner, input, call, pairs, count, scale_type,
                                  static_cast<float>(alpha), static_cast<float>(limit));
        activated.pack(inner_rows_scratch, inner, count, width,
                       matrix_of<Code>(call.down, 0, call.group, scale_type));
        multiply_down<Code, T>(activated, call, pairs, count, scale_type);
    });
}

}  // namespace mill
