// All decoder layers for a few tokens in one call, by the ops of this library.
//
// Computes: logits[R, vocab] of residual[M, H]: RMSNorm, QKV linear, RoPE + KV-cache write, paged
//     attention, output linear, SwiGLU MLP and the LM head
// Dtypes: activations float32, bfloat16 or float16; weights of those types, int8, or int4 and int8
//     with group scales
// Layout: as the ops that it calls
// Range: M ≤ 16 per call (the op takes up to 32 in two)
// Technique: one call instead of some 150: no host work between the ops
// Ops: decode
#include "common/ops.h"
#include "common/simd.h"
#include "common/parallel_for.h"

namespace {

// Layout as packed by decode.py: every field is one 64-bit word.
struct Matrix {
    const void* weight;
    const void* scale;  // null where the weight is of the activations' dtype
    const void* bias;
    int64_t n, k;
    const void* offset;
    // code_bits: 4 or 8 (groupwise, scales in f16 if half, else float); 0: not groupwise
    int64_t group, half, code_bits;
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

void run_linear(void* out, const void* x, const Matrix& m, int64_t rows, int dtype) {
    if (m.code_bits) {
        const auto product = m.code_bits == 4 ? int4_linear : int8_group_linear;
        product(out, x, static_cast<const uint8_t*>(m.weight), m.scale, m.offset, m.bias, rows, m.k,
                m.n, m.group, dtype, static_cast<int>(m.half));
    } else if (m.scale)
        int8_linear(out, x, static_cast<const int8_t*>(m.weight),
                    static_cast<const float*>(m.scale), m.bias, rows, m.k, m.n, dtype);
    else
        linear(out, x, m.weight, m.bias, rows, m.k, m.n, dtype);
}

// Gathers the rows whose logits are requested.
void gather_rows(char* out, const char* x, const Tokens& t, size_t bytes) {
    for (int64_t r = 0; r < t.rows; r++) {
        const size_t from = static_cast<size_t>(t.logit_rows ? t.logit_rows[r] : r);
        std::memcpy(out + static_cast<size_t>(r) * bytes, x + from * bytes, bytes);
    }
}

int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace

// logits: [rows, vocabulary] float. residual: [count, hidden], the embeddings, written over.
extern "C" void decode(float* logits, void* residual, const void* stack_words,
                       const void* layer_words, const void* token_words, double eps, int dtype) {
    const Stack& s = *static_cast<const Stack*>(stack_words);
    const Layer* layers = static_cast<const Layer*>(layer_words);
    const Tokens& t = *static_cast<const Tokens*>(token_words);
    const int64_t size = dtype == mill::kFloat ? 4 : 2, count = t.count, wide = s.heads * s.dim;
    const double scale = 1.0 / std::sqrt(static_cast<double>(s.dim));
    int64_t inner = 0;
    for (int64_t i = 0; i < s.layers; i++) inner = max_of(inner, layers[i].gate_up.n);
    thread_local mill::Scratch normed_s, branch_s, middle_s, mixed_s;
    char* normed = normed_s.get<char>(max_of(count, t.rows) * s.hidden * size);
    char* branch = branch_s.get<char>(max_of(count, t.rows) * s.hidden * size);
    char* middle = middle_s.get<char>(
        max_of(count * max_of(inner, wide + 2 * s.kv_heads * s.dim), t.rows * s.hidden) * size);
    char* q_or_gate = mixed_s.get<char>(count * max_of(2 * wide, inner / 2) * size);
    char* attention_out = q_or_gate + count * wide * size;
    for (int64_t i = 0; i < s.layers; i++) {
        const Layer& l = layers[i];
        if (i == 0)
            rms_norm(normed, residual, l.attn_norm, count, s.hidden, eps, dtype);
        else
            add_rms_norm(normed, residual, branch, l.attn_norm, count, s.hidden, eps, dtype);
        run_linear(middle, normed, l.qkv, count, dtype);
        rope_cache(q_or_gate, middle, l.k_cache, l.v_cache, t.slots, t.cosine, t.sine, t.q_scale,
                   l.q_norm, l.k_norm, count, s.heads, s.kv_heads, s.dim, s.page_size, eps, dtype,
                   dtype);
        paged_attention(attention_out, q_or_gate, l.k_cache, l.v_cache, t.tables, t.starts,
                        t.contexts, nullptr, nullptr, nullptr, nullptr, t.sequences, s.heads,
                        s.kv_heads, s.page_size, s.dim, s.dim, t.table_stride, l.window, scale, 0.0,
                        dtype, dtype);
        run_linear(branch, attention_out, l.o, count, dtype);
        add_rms_norm(normed, residual, branch, l.mlp_norm, count, s.hidden, eps, dtype);
        run_linear(middle, normed, l.gate_up, count, dtype);
        silu_mul(q_or_gate, middle, count, l.down.k, dtype);
        run_linear(branch, q_or_gate, l.down, count, dtype);
    }
    gather_rows(middle, static_cast<const char*>(residual), t,
                static_cast<size_t>(s.hidden * size));
    gather_rows(normed, branch, t, static_cast<size_t>(s.hidden * size));
    add_rms_norm(branch, middle, normed, s.norm, t.rows, s.hidden, eps, dtype);
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* rounded = reinterpret_cast<T*>(logits);
        if constexpr (sizeof(T) != sizeof(float)) {
            thread_local mill::Scratch scratch;
            rounded = scratch.get<T>(t.rows * s.head.n);
        }
        run_linear(rounded, branch, s.head, t.rows, dtype);
        if constexpr (sizeof(T) != sizeof(float))
            mill::for_each_vector(t.rows * s.head.n, [&](int64_t i, int c) {
                mill::put(logits + i, mill::take(rounded + i, c), c);
            });
    });
}
