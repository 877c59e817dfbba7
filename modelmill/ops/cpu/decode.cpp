// All layers of a decoder for a few tokens, in one call: the ops of this library one after another.
#include "ops.h"
#include "simd.h"
#include "parallel_for.h"

namespace {

// As decode.py lays them out: every field one 64-bit word.
struct Matrix {
    const void* weight;
    const void* scale;  // null where the weight is of the activations' dtype
    const void* bias;
    int64_t n, k;
    const void* offset;
    int64_t group, half, form;  // form: 4 or 8 bits in groups, with scales in f16 (half) or float; 0: neither
};
struct Layer {
    const void *attn_norm, *mlp_norm, *q_norm, *k_norm;
    void *k_cache, *v_cache;
    int64_t window;
    Matrix qkv, o, gate_up, down;
};
struct Stack {
    int64_t layers, hidden, heads, kv_heads, dim, page_size;
    const void* norm;
    Matrix head;
};
struct Tokens {
    int64_t count, sequences, table_stride, rows;
    const int64_t *slots, *logit_rows;
    const int32_t *tables, *starts, *contexts;
    const float *cosine, *sine, *q_scale;
};

void times(void* out, const void* x, const Matrix& m, int64_t rows, int dtype) {
    if (m.form) {
        const auto product = m.form == 4 ? int4_linear : int8_group_linear;
        product(out, x, static_cast<const uint8_t*>(m.weight), m.scale, m.offset, m.bias, rows, m.k, m.n, m.group, dtype,
                static_cast<int>(m.half));
    } else if (m.scale)
        int8_linear(out, x, static_cast<const int8_t*>(m.weight), static_cast<const float*>(m.scale), m.bias, rows, m.k,
                    m.n, dtype);
    else linear(out, x, m.weight, m.bias, rows, m.k, m.n, dtype);
}

// The rows wanted, side by side in `out`.
void pick(char* out, const char* x, const Tokens& t, size_t bytes) {
    for (int64_t r = 0; r < t.rows; r++) {
        const size_t from = static_cast<size_t>(t.logit_rows ? t.logit_rows[r] : r);
        std::memcpy(out + static_cast<size_t>(r) * bytes, x + from * bytes, bytes);
    }
}

int64_t largest(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace

// logits: [rows, vocabulary] float. residual: [count, hidden], the embeddings, written over.
extern "C" void decode(float* logits, void* residual, const void* stack_words, const void* layer_words,
                       const void* token_words, double eps, int dtype) {
    const Stack& s = *static_cast<const Stack*>(stack_words);
    const Layer* layers = static_cast<const Layer*>(layer_words);
    const Tokens& t = *static_cast<const Tokens*>(token_words);
    const int64_t size = dtype == mill::kFloat ? 4 : 2, count = t.count, wide = s.heads * s.dim;
    const double scale = 1.0 / std::sqrt(static_cast<double>(s.dim));
    int64_t inner = 0;
    for (int64_t i = 0; i < s.layers; i++) inner = largest(inner, layers[i].gate_up.n);
    thread_local mill::Scratch normed_s, branch_s, middle_s, mixed_s;
    char* normed = normed_s.get<char>(largest(count, t.rows) * s.hidden * size);
    char* branch = branch_s.get<char>(largest(count, t.rows) * s.hidden * size);
    char* middle = middle_s.get<char>(largest(count * largest(inner, wide + 2 * s.kv_heads * s.dim), t.rows * s.hidden) * size);
    char* mixed = mixed_s.get<char>(count * largest(2 * wide, inner / 2) * size);
    char* mixture = mixed + count * wide * size;
    for (int64_t i = 0; i < s.layers; i++) {
        const Layer& l = layers[i];
        if (i == 0) rms_norm(normed, residual, l.attn_norm, count, s.hidden, eps, dtype);
        else add_rms_norm(normed, residual, branch, l.attn_norm, count, s.hidden, eps, dtype);
        times(middle, normed, l.qkv, count, dtype);
        rope_cache(mixed, middle, l.k_cache, l.v_cache, t.slots, t.cosine, t.sine, t.q_scale, l.q_norm, l.k_norm, count,
                   s.heads, s.kv_heads, s.dim, s.page_size, eps, dtype, dtype);
        paged_attention(mixture, mixed, l.k_cache, l.v_cache, t.tables, t.starts, t.contexts, nullptr, nullptr, t.sequences,
                        s.heads, s.kv_heads, s.page_size, s.dim, t.table_stride, l.window, scale, dtype, dtype);
        times(branch, mixture, l.o, count, dtype);
        add_rms_norm(normed, residual, branch, l.mlp_norm, count, s.hidden, eps, dtype);
        times(middle, normed, l.gate_up, count, dtype);
        silu_mul(mixed, middle, count, l.down.k, dtype);
        times(branch, mixed, l.down, count, dtype);
    }
    pick(middle, static_cast<const char*>(residual), t, static_cast<size_t>(s.hidden * size));
    pick(normed, branch, t, static_cast<size_t>(s.hidden * size));
    add_rms_norm(branch, middle, normed, s.norm, t.rows, s.hidden, eps, dtype);
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* rounded = reinterpret_cast<T*>(logits);
        if constexpr (sizeof(T) != sizeof(float)) {
            thread_local mill::Scratch scratch;
            rounded = scratch.get<T>(t.rows * s.head.n);
        }
        times(rounded, branch, s.head, t.rows, dtype);
        if constexpr (sizeof(T) != sizeof(float))
            mill::each(t.rows * s.head.n, [&](int64_t i, int c) { mill::put(logits + i, mill::take(rounded + i, c), c); });
    });
}
