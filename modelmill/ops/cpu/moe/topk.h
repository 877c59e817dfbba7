// The experts of one token and their weights, from the router's logits.
//
// Computes: weights[top_k] and ids[top_k] of logits[E]
// Dtypes: logits and weights float32; bias float32, bfloat16 or float16; ids int32
// Layout: packed
// Range: any E; groups of one size, ranked by one or two scores
// Technique: SIMD softmax or sigmoid, or SparseMixer's rivals; one maximum after another
// Used by: fused_topk.cpp, routed_moe.cpp
//
// Of equal scores the lower id is first. A score of NaN ranks last, like the experts of groups that
// the token does not have, so that every slot gets another valid id.
#pragma once
#include "common/parallel_for.h"
#include "norm_quantize/activation.h"

#include <cfloat>
#include <cmath>
#include <limits>

namespace mill {

// How experts are chosen, as moe/fused_topk.py packs it.
struct TopkRules {
    const void* bias;  // [E], added to the scores for the choice, or null
    int64_t bias_dtype, experts, top_k, scores, renormalize, groups, top_groups, group_scores;
    double scale, jitter, sum_eps;
};

enum Scores { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

constexpr float kTaken = -std::numeric_limits<float>::infinity(), kLast = -FLT_MAX;

// scores[padded] of logits[count]; 0 behind the last one. SparseMixer ranks the logits themselves.
inline void score_experts(float* scores, const float* logits, int64_t count, int64_t padded,
                          int64_t kind) {
    std::memcpy(scores, logits, static_cast<size_t>(count) * sizeof(float));
    for (int64_t i = count; i < padded; i++) scores[i] = kTaken;
    if (kind == kSparseMixer) return;
    if (kind == kSigmoid) {
        for (int64_t i = 0; i < padded; i += W)
            store(scores + i, sigmoid_times(set1(1.0f), load(scores + i)));
        return;
    }
    vf largest = set1(kTaken), total = zero();
    for (int64_t i = 0; i < padded; i += W) largest = max(largest, load(scores + i));
    const vf shift = set1(reduce_max(largest));
    for (int64_t i = 0; i < padded; i += W) {
        const vf power = exp(sub(load(scores + i), shift));
        total = add(total, power);
        store(scores + i, power);
    }
    const vf divisor = set1(sum(total));
    for (int64_t i = 0; i < padded; i += W) store(scores + i, div(load(scores + i), divisor));
}

// What experts are chosen by, ranked[padded]; behind the last one kTaken.
inline void rank_experts(float* ranked, const float* scores, int64_t padded,
                         const TopkRules& rules) {
    std::memcpy(ranked, scores, static_cast<size_t>(padded) * sizeof(float));
    if (rules.bias)
        by_dtype(static_cast<int>(rules.bias_dtype), [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            const T* bias = static_cast<const T*>(rules.bias);
            for_each_vector(rules.experts, [&](int64_t i, int c) {
                put(ranked + i, add(take(ranked + i, c), take(bias + i, c)), c);
            });
        });
    for (int64_t i = 0; i < rules.experts; i++) ranked[i] = ranked[i] > kLast ? ranked[i] : kLast;
    for (int64_t i = rules.experts; i < padded; i++) ranked[i] = kTaken;
}

// Leaves the experts of the best groups; scratch: two floats a group.
inline void limit_to_groups(float* ranked, float* scratch, const TopkRules& rules) {
    const int64_t size = rules.experts / rules.groups;
    float *group_scores = scratch, *chosen = scratch + rules.groups;
    for (int64_t g = 0; g < rules.groups; g++) {
        float best = kTaken, second = kTaken;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            const float low = ranked[i] < best ? ranked[i] : best;
            best = ranked[i] > best ? ranked[i] : best;
            second = low > second ? low : second;
        }
        group_scores[g] = rules.group_scores == 2 ? best + second : best;
        chosen[g] = 0.0f;
    }
    for (int64_t turn = 0; turn < rules.top_groups; turn++) {
        int64_t best = -1;
        for (int64_t g = 0; g < rules.groups; g++)
            if (chosen[g] == 0.0f && (best < 0 || group_scores[g] > group_scores[best])) best = g;
        if (best >= 0) chosen[best] = 1.0f;
    }
    for (int64_t i = 0; i < rules.experts; i++)
        if (chosen[i / size] == 0.0f) ranked[i] = kLast;
}

// The first of the largest values, which is taken from them.
inline int64_t take_largest(float* ranked, int64_t padded) {
    vf largest = load(ranked);
    for (int64_t i = W; i < padded; i += W) largest = max(largest, load(ranked + i));
    const float value = reduce_max(largest);
    int64_t at = 0;
    while (ranked[at] != value) at++;
    ranked[at] = kTaken;
    return at;
}

// SparseMixer's weight of an expert among those that were not chosen before it (`taken`): the
// softmax over the logits that noise could make the best one.
inline float rival_weight(const float* logits, int64_t count, int64_t expert, const int32_t* taken,
                          int64_t turn, double jitter) {
    const float best = logits[expert], threshold = static_cast<float>(2.0 * jitter);
    float total = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        bool before = false;
        for (int64_t k = 0; k < turn; k++) before = before || taken[k] == i;
        const float size = std::fabs(logits[i]), largest = size > best ? size : best;
        if (before || (best - logits[i]) / largest > threshold) continue;
        total += std::exp(logits[i] - best);
    }
    return 1.0f / total;
}

// The choice of one token; top_k is at most the number of experts.
inline void choose_experts(float* weights, int32_t* ids, const float* logits, Scratch& scratch,
                           const TopkRules& rules) {
    const int64_t padded = (rules.experts + W - 1) / W * W;
    float* scores = scratch.get<float>(2 * padded + 2 * rules.groups);
    float* ranked = scores + padded;
    score_experts(scores, logits, rules.experts, padded, rules.scores);
    rank_experts(ranked, scores, padded, rules);
    if (rules.groups > 1) limit_to_groups(ranked, ranked + padded, rules);
    float total = 0.0f;
    for (int64_t k = 0; k < rules.top_k; k++) {
        const int64_t expert = take_largest(ranked, padded);
        ids[k] = static_cast<int32_t>(expert);
        weights[k] = rules.scores == kSparseMixer
                         ? rival_weight(logits, rules.experts, expert, ids, k, rules.jitter)
                         : scores[expert];
        total += weights[k];
    }
    const float divisor = rules.renormalize ? total + static_cast<float>(rules.sum_eps) : 1.0f;
    const float scale = static_cast<float>(rules.scale);
    for (int64_t k = 0; k < rules.top_k; k++) weights[k] = weights[k] / divisor * scale;
}

}  // namespace mill
