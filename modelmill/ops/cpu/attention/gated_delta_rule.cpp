// The gated delta rule (arXiv:2412.06464), token by token.
//
// Computes: o[T, H·dv] and the states [H, dk, dv] of decodes and prompts, with a snapshot of each
// Dtypes: q, k, v float32, bfloat16 or float16; states float32; gates and decays float64
// Layout: rows of q | k | v with a stride; states by slot, read and written in place
// Range: any dk and dv
// Technique: SIMD (simd.h), columns of a state in registers, thread pool over sequences and heads
// Ops: gated_delta_rule
#include "attention/state_rows.h"

namespace {

constexpr int kVectors = 4;  // of a block of columns

struct Delta {
    int64_t heads, key_heads, dk, dv, row_stride, slot_stride;
    double eps;
};

// A token's key and query of length 1, their product, and what decays and corrects the state.
struct Token {
    const float *key, *query;
    float overlap, decay, beta;
};

void unit(float* x, int64_t n, double eps, float scale) {
    mill::vf squares = mill::zero();
    mill::for_each_vector(n, [&](int64_t i, int c) {
        const mill::vf v = mill::take(x + i, c);
        squares = mill::fma(v, v, squares);
    });
    const mill::vf factor =
        mill::set1(scale / std::sqrt(mill::sum(squares) + static_cast<float>(eps)));
    mill::for_each_vector(
        n, [&](int64_t i, int c) { mill::put(x + i, mill::mul(mill::take(x + i, c), factor), c); });
}

float product(const float* a, const float* b, int64_t n) {
    mill::vf total = mill::zero();
    mill::for_each_vector(n, [&](int64_t i, int c) {
        total = mill::fma(mill::take(a + i, c), mill::take(b + i, c), total);
    });
    return mill::sum(total);
}

// Advances N vectors of columns: o = α Sᵀ q + (k · q) u and S ← α S + k uᵀ, with the correction
// u = β (v − α Sᵀ k), so that the state is read twice and written once.
template <int N, class T>
void columns(float* s, const Token& t, int64_t dk, int64_t dv, const T* v, float* out, int c) {
    using namespace mill;
    vf answer[N], read[N];
    for (int n = 0; n < N; n++) answer[n] = read[n] = zero();
    for (int64_t k = 0; k < dk; k++) {
        const vf key = set1(t.key[k]), query = set1(t.query[k]);
        for (int n = 0; n < N; n++) {
            const vf x = take(s + k * dv + n * W, c);
            answer[n] = fma(x, key, answer[n]);
            read[n] = fma(x, query, read[n]);
        }
    }
    const vf decay = set1(t.decay);
    for (int n = 0; n < N; n++) {
        const vf left = sub(take(v + n * W, c), mul(decay, answer[n]));
        answer[n] = mul(left, set1(t.beta));
        put(out + n * W, fma(answer[n], set1(t.overlap), mul(decay, read[n])), c);
    }
    for (int64_t k = 0; k < dk; k++) {
        const vf key = set1(t.key[k]);
        for (int n = 0; n < N; n++) {
            float* at = s + k * dv + n * W;
            put(at, fma(key, answer[n], mul(decay, take(at, c))), c);
        }
    }
}

template <class T>
void head(const Delta& d, const mill::StateSequence& seq, int64_t h, const T* qkv,
          const float* gates, double rate, double bias, float* state, float* out) {
    thread_local mill::Scratch scratch;
    float* key = scratch.get<float>(2 * d.dk);
    float* query = key + d.dk;
    const mill::HeadState s(seq, state, d.slot_stride, h, d.dk * d.dv);
    const int64_t key_head = h / (d.heads / d.key_heads);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d.dk));
    for (int64_t i = 0; i < seq.count; i++) {
        const int64_t t = seq.start + i;
        const T* row = qkv + t * d.row_stride;
        mill::to_floats(query, row + key_head * d.dk, d.dk);
        mill::to_floats(key, row + (d.key_heads + key_head) * d.dk, d.dk);
        unit(query, d.dk, d.eps, scale);
        unit(key, d.dk, d.eps, 1.0f);
        const float* gate = gates + t * 2 * d.heads + h;
        const Token token{
            key, query, product(key, query, d.dk),
            static_cast<float>(std::exp(-rate * mill::softplus(gate[d.heads] + bias))),
            static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(*gate))))};
        const T* value = row + 2 * d.key_heads * d.dk + h * d.dv;
        float* o = out + (t * d.heads + h) * d.dv;
        int64_t v = 0;
        for (; v + kVectors * mill::W <= d.dv; v += kVectors * mill::W)
            columns<kVectors>(s.own + v, token, d.dk, d.dv, value + v, o + v, mill::W);
        for (; v < d.dv; v += mill::W)
            columns<1>(s.own + v, token, d.dk, d.dv, value + v, o + v,
                       static_cast<int>(d.dv - v < mill::W ? d.dv - v : mill::W));
        s.keep_behind(i + 1);
    }
}

}  // namespace

// Shapes as in ops/gated_delta_rule.py; a_log and dt_bias float32.
extern "C" void gated_delta_rule(float* out, const void* qkv, const float* gates,
                                 const float* a_log, const float* dt_bias, float* state,
                                 const int32_t* query_start, const int64_t* positions,
                                 const int64_t* slots, const int64_t* snapshot_slots,
                                 const int64_t* snapshot_ends, int64_t sequences, int64_t tokens,
                                 int64_t heads, int64_t key_heads, int64_t dk, int64_t dv,
                                 int64_t row_stride, int64_t slot_stride, double eps, int dtype) {
    const mill::StateRows rows{query_start,    positions,     slots,
                               snapshot_slots, snapshot_ends, sequences};
    const Delta d{heads, key_heads, dk, dv, row_stride, slot_stride, eps};
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t work = tokens * heads * dk * dv * 4;
        mill::for_each_part(rows, heads, work, [&](const mill::StateSequence& seq, int64_t h) {
            head(d, seq, h, static_cast<const T*>(qkv), gates,
                 std::exp(static_cast<double>(a_log[h])), dt_bias[h], state, out);
        });
    });
}
