// q/k norm, RoPE, logn scale and KV-cache write.
//
// Computes: q[T, heads, dim], and k, v to their slots, from qkv[T, (heads + 2 · kv_heads) · dim]
// Dtypes: qkv, q and cache float32, bfloat16 or float16; float32 angles
// Layout: qkv row-major; pages [pages, kv_heads, page_size, dim], contiguous; int64 slots
// Range: any M
// Technique: SIMD (simd.h), thread pool
// Ops: rope_cache, decode
#include "common/ops.h"
#include "attention/rope.h"
#include "common/parallel_for.h"

namespace {

struct Rope {
    int64_t tokens, heads, kv_heads, dim, page_size;
    const int64_t* slots;
    const float *cosine, *sine, *q_scale;
    float eps;
};

template <class T, class C>
void rows(const Rope& r, T* q_out, const T* qkv, C* k_cache, C* v_cache, const T* q_norm,
          const T* k_norm, int64_t from, int64_t to) {
    thread_local mill::Scratch scratch;
    T* key = scratch.get<T>(r.dim);
    for (int64_t t = from; t < to; t++) {
        const T* row = qkv + t * (r.heads + 2 * r.kv_heads) * r.dim;
        const float* cosine = r.cosine ? r.cosine + t * (r.dim / 2) : nullptr;
        const float* sine = r.sine ? r.sine + t * (r.dim / 2) : nullptr;
        const float scale = r.q_scale ? r.q_scale[t] : 1.0f;
        for (int64_t h = 0; h < r.heads; h++)
            mill::rope_row(q_out + (t * r.heads + h) * r.dim, row + h * r.dim, q_norm, cosine, sine,
                           scale, r.dim, r.eps);
        if (r.slots[t] < 0) continue;
        const int64_t page = r.slots[t] / r.page_size, offset = r.slots[t] % r.page_size;
        for (int64_t h = 0; h < r.kv_heads; h++) {
            const int64_t at = ((page * r.kv_heads + h) * r.page_size + offset) * r.dim;
            mill::rope_row(key, row + (r.heads + h) * r.dim, k_norm, cosine, sine, 1.0f, r.dim,
                           r.eps);
            const T* value = row + (r.heads + r.kv_heads + h) * r.dim;
            mill::for_each_vector(r.dim, [&](int64_t i, int c) {
                mill::put(k_cache + at + i, mill::take(key + i, c), c);
                mill::put(v_cache + at + i, mill::take(value + i, c), c);
            });
        }
    }
}

}  // namespace

// Shapes as in ops/rope_cache.py; cosine and sine, q_scale, and the norms may be null. The cache
// has its own dtype.
extern "C" void rope_cache(void* q_out, const void* qkv, void* k_cache, void* v_cache,
                           const int64_t* slots, const float* cosine, const float* sine,
                           const float* q_scale, const void* q_norm, const void* k_norm,
                           int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                           int64_t page_size, double eps, int dtype, int cache_dtype) {
    const mill::UseTorchThreads team(mill::torch_multiplies(tokens, dtype));
    const Rope r{tokens, heads,  kv_heads, dim,     page_size,
                 slots,  cosine, sine,     q_scale, static_cast<float>(eps)};
    mill::by_dtype(dtype, [&](auto* type) {
        mill::by_dtype(cache_dtype, [&](auto* cache_type) {
            using T = std::remove_pointer_t<decltype(type)>;
            using C = std::remove_pointer_t<decltype(cache_type)>;
            mill::parallel_for_rows(tokens, (heads + 2 * kv_heads) * dim * 2 * sizeof(T),
                                    [&](int64_t from, int64_t to) {
                                        rows(r, static_cast<T*>(q_out), static_cast<const T*>(qkv),
                                             static_cast<C*>(k_cache), static_cast<C*>(v_cache),
                                             static_cast<const T*>(q_norm),
                                             static_cast<const T*>(k_norm), from, to);
                                    });
        });
    });
}
