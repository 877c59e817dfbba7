// What stands between the two products of an expert.
//
// Computes: act(gate) · up
// Dtypes: float32
// Layout: registers
// Range: SiLU, GELU by tanh, gpt-oss's clamped SwiGLU
// Technique: one exponential for each value
// Used by: grouped_gemm_wq.cu, moe_decode_mxfp4.cu
//
// Macro: GATE (0: SiLU, 1: GELU by tanh, 2: clamped SwiGLU).
#pragma once

// Both values were rounded to x's type. alpha, limit: of the clamped gate.
__device__ inline float activated(float gate, float up, float alpha, float limit) {
    float exponent = gate;
    if (GATE == 1) {  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
        exponent = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    } else if (GATE == 2) {  // comparisons that keep what is no number
        gate = gate > limit ? limit : gate;
        up = (up > limit ? limit : up < -limit ? -limit : up) + 1.0f;
        exponent = alpha * gate;
    }
    return gate / (1.0f + __expf(-exponent)) * up;
}
