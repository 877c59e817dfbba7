// Types of the weight-only kernels.
//
// Computes: ScaleT (group scales and offsets) and Out
// Dtypes: scales float16, with SCALE_FP32 float32; out 16 bits (half_types.cuh), with OUT_FP32
//     float32
// Layout: none of its own
// Range: any
// Technique: compile-time types
// Used by: tile_scales.cuh, weight_only.cuh, wq_gemm_tile.cuh
#pragma once
#include "common/half_types.cuh"

#if SCALE_FP32
typedef float ScaleT;
#else
typedef u16 ScaleT;
#endif
__device__ inline float scale_to_float(float x) { return x; }
__device__ inline float scale_to_float(u16 bits) { return half_to_float(bits); }

#ifdef OUT_FP32
typedef float Out;
__device__ inline float out_value(float x) { return x; }
__device__ inline float as_out(float x) { return x; }
#else
typedef u16 Out;
__device__ inline float out_value(u16 bits) { return to_float(bits); }
__device__ inline u16 as_out(float wide) { return rounded(wide); }
#endif
