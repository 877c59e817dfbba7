// A whole mixture of experts for few tokens: router, choice and experts in one call.
//
// Computes: out[M, H] = Σ weights · down(act(gate) · up) (+ shared) over the experts that the
// router
//     chooses
// Dtypes: x, router and out float32, bfloat16 or float16, all the same; int8, int4 or MXFP4 experts
// Layout: as the ops that it calls
// Range: any M, meant for few
// Technique: calls router_gemm, topk.h and int8_, int4_ or mxfp4_fused_moe; no intermediate leaves
//     the call
// Ops: routed_moe
#include "common/ops.h"
#include "moe/expert_matrices.h"
#include "moe/topk.h"

namespace {

// As moe/routed_moe.py packs it.
struct RoutedMoE {
    const void* router;
    const void* router_bias;   // [E] or null
    const void* expert_scale;  // [E] or null
    int64_t router_bias_dtype, expert_scale_dtype;
    double logit_scale, alpha, limit;
    int64_t weights, scale_type;  // weights: see kOps
    mill::TopkRules rules;
    mill::ExpertsCall experts;
};

constexpr decltype(&int8_fused_moe) kOps[] = {int8_fused_moe, int4_fused_moe, mxfp4_fused_moe};

float number(const void* values, int64_t dtype, int64_t i) {
    float value = 0.0f;
    mill::by_dtype(static_cast<int>(dtype), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        value = mill::to_float(static_cast<const T*>(values)[i]);
    });
    return value;
}

}  // namespace

extern "C" void routed_moe(void* out, const void* x, const void* router_input, const void* shared,
                           const void* words, int64_t tokens, int dtype) {
    const auto& moe = *static_cast<const RoutedMoE*>(words);
    const int64_t experts = moe.rules.experts, top_k = moe.rules.top_k;
    thread_local mill::Scratch logit_scratch, choice_scratch, topk_scratch;
    float* logits = logit_scratch.get<float>(tokens * experts);
    float* weights = choice_scratch.get<float>(2 * tokens * top_k);
    auto* ids = reinterpret_cast<int32_t*>(weights + tokens * top_k);
    router_gemm(logits, router_input, moe.router, tokens, moe.experts.gate_up.columns, experts,
                dtype);
    const auto scale = static_cast<float>(moe.logit_scale);
    for (int64_t i = 0; i < tokens * experts; i++) {
        logits[i] *= scale;
        if (moe.router_bias)
            logits[i] += number(moe.router_bias, moe.router_bias_dtype, i % experts);
    }
    for (int64_t t = 0; t < tokens; t++)
        mill::choose_experts(weights + t * top_k, ids + t * top_k, logits + t * experts,
                             topk_scratch, moe.rules);
    if (moe.expert_scale)
        for (int64_t i = 0; i < tokens * top_k; i++)
            weights[i] *= number(moe.expert_scale, moe.expert_scale_dtype, ids[i]);
    mill::ExpertsCall call = moe.experts;
    call.out = out;
    call.x = x;
    call.topk_weights = weights;
    call.topk_ids = ids;
    call.shared = shared;
    call.tokens = tokens;
    kOps[moe.weights](&call, moe.alpha, moe.limit, dtype, static_cast<int>(moe.scale_type));
}
