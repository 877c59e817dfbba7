// What a call of the experts' kernels is made of.
//
// Computes: declarations only
// Dtypes: as the kernels
// Layout: weights [E, N, row], the experts any number of bytes apart
// Range: as the kernels
// Technique: none of its own
// Used by: experts.h, routed_moe.cpp
#pragma once
#include <cstdint>

namespace mill {

// One product of all experts, as moe/experts.py packs it; strides: bytes from expert to expert.
struct ExpertMatrices {
    const uint8_t* codes;
    const uint8_t* scale;
    const uint8_t* offset;  // null: symmetric
    const void* bias;       // [E, N] or null
    int64_t codes_stride, scale_stride, offset_stride, rows, columns;
};

// kRelu2: of experts without a gate, whose first product has no rows of one.
enum Gate { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2, kRelu2 = 3 };

struct ExpertsCall {
    void* out;
    const void* x;
    const float* topk_weights;
    const int32_t* topk_ids;
    const void* shared;  // null: none
    int64_t tokens, top_k, experts, group, gate;
    ExpertMatrices gate_up, down;
};

}  // namespace mill
