// The experts of each token and their weights, from the router's logits.
//
// Computes: weights[M, top_k] and ids[M, top_k] of logits[M, E]
// Dtypes: logits and weights float32; bias float32, bfloat16 or float16; ids int32
// Layout: row-major, contiguous rows
// Range: any M and E; groups of one size, ranked by one or two scores
// Technique: SIMD softmax or sigmoid, one maximum after another (topk.h)
// Ops: fused_topk
#include "moe/topk.h"

extern "C" void fused_topk(float* weights, int32_t* ids, const float* logits, const void* rules,
                           int64_t rows) {
    const auto& rule = *static_cast<const mill::TopkRules*>(rules);
    const int64_t row_bytes = rule.experts * 4 * (rule.top_k + 4);
    mill::parallel_for_rows(rows, row_bytes, [&](int64_t from, int64_t to) {
        thread_local mill::Scratch scratch;
        for (; from < to; from++)
            mill::choose_experts(weights + from * rule.top_k, ids + from * rule.top_k,
                                 logits + from * rule.experts, scratch, rule);
    });
}
