// Types of products with 4- and 8-bit weights. Macros: WIDE (scales and offsets are float32, else float16), FLOAT (the
// output is float32, else of 16 bits: half_types.cuh).
#pragma once
#include "half_types.cuh"

#if WIDE
typedef float ScaleT;
#else
typedef u16 ScaleT;
#endif
__device__ inline float scale_to_float(float x) { return x; }
__device__ inline float scale_to_float(u16 bits) { return widened(bits); }

#ifdef FLOAT
typedef float Out;
__device__ inline float out_value(float x) { return x; }
__device__ inline float as_out(float x) { return x; }
#else
typedef u16 Out;
__device__ inline float out_value(u16 bits) { return value(bits); }
__device__ inline u16 as_out(float wide) { return rounded(wide); }
#endif
