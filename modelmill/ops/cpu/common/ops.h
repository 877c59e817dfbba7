// C declarations of the ops that other ops call.
//
// Computes: declarations only; their source files include this header too, so that the compiler
//     rejects a declaration that does not match: C linkage has no types
// Range: as the ops
// Technique: none of its own
// Used by: add_rms_norm.cpp, decode.cpp, int4_fused_moe.cpp, int4_linear.cpp, int8_fused_moe.cpp,
//     int8_group_linear.cpp, int8_linear.cpp, linear.cpp, mxfp4_fused_moe.cpp, paged_attention.cpp,
//     rms_norm.cpp, rope_cache.cpp, routed_moe.cpp, router_gemm.cpp, silu_mul.cpp
#pragma once

#include <cstdint>

extern "C" {
void linear(void* out, const void* x, const void* weight, const void* bias, int64_t rows, int64_t k,
            int64_t n, int dtype);
void int8_linear(void* out, const void* x, const int8_t* weight, const float* scale,
                 const void* bias, int64_t rows, int64_t k, int64_t n, int dtype);
void int4_linear(void* out, const void* x, const uint8_t* codes, const void* scale,
                 const void* offset, const void* bias, int64_t rows, int64_t k, int64_t n,
                 int64_t group, int dtype, int half);
void int8_group_linear(void* out, const void* x, const uint8_t* codes, const void* scale,
                       const void* offset, const void* bias, int64_t rows, int64_t k, int64_t n,
                       int64_t group, int dtype, int half);
void rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t width, double eps,
              int dtype);
void add_rms_norm(void* out, void* residual, const void* x, const void* weight, int64_t rows,
                  int64_t width, double eps, int dtype);
void silu_mul(void* out, const void* gate_up, int64_t rows, int64_t inner, int dtype);
void rope_cache(void* q_out, const void* qkv, void* k_cache, void* v_cache, const int64_t* slots,
                const float* cosine, const float* sine, const float* q_scale, const void* q_norm,
                const void* k_norm, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                int64_t page_size, double eps, int dtype, int cache_dtype);
void paged_attention(void* out, const void* q, const void* k_cache, const void* v_cache,
                     const int32_t* tables, const int32_t* starts, const int32_t* contexts,
                     const float* k_scale, const float* v_scale, const float* slopes,
                     const float* sinks, int64_t sequences, int64_t heads, int64_t kv_heads,
                     int64_t page_size, int64_t dim, int64_t value_dim, int64_t table_stride,
                     int64_t window, double scale, double softcap, int dtype, int cache_dtype);
void router_gemm(float* out, const void* x, const void* weight, int64_t rows, int64_t hidden,
                 int64_t experts, int dtype);
void int8_fused_moe(const void* words, double alpha, double limit, int dtype, int scale_type);
void int4_fused_moe(const void* words, double alpha, double limit, int dtype, int scale_type);
void mxfp4_fused_moe(const void* words, double alpha, double limit, int dtype, int scale_type);
}
