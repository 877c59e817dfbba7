// Types of the weight-only kernels: ScaleT (group scales and offsets) and Out. Macros: SCALE_FP32
// (scales and offsets are float32, else float16), OUT_FP32 (float32 output, else 16 bits:
// half_types.cuh).
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
