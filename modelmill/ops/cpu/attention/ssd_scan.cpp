// Mamba2's state space recurrence (arXiv:2405.21060), token by token.
//
// Computes: y[T, H·P] and the states [H, P, N] of decodes and prompts, with a snapshot of each
// Dtypes: x, B, C float32, bfloat16 or float16; states float32; steps and decays float64
// Layout: rows of x | B | C with a stride; states by slot, read and written in place
// Range: any P and N
// Technique: SIMD (simd.h), four rows of a state at once, thread pool over sequences and heads
// Ops: ssd_scan
#include "attention/state_rows.h"

namespace {

constexpr int kRows = 4;

struct Scan {
    int64_t heads, groups, dim, size, row_stride, slot_stride;
    double least, most;
};

struct HeadRates {
    double rate, bias;
    float skip;
};

// Advances R rows of a state: S ← decay S + (Δ x) Bᵀ, y = S C + D x.
template <int R>
void advance_rows(float* s, const float* x, const float* b, const float* c, int64_t size,
                  float decay, float delta, float skip, float* out) {
    using namespace mill;
    vf total[R], written[R];
    const vf kept = set1(decay);
    for (int r = 0; r < R; r++) {
        total[r] = zero();
        written[r] = set1(x[r] * delta);
    }
    for_each_vector(size, [&](int64_t n, int count) {
        const vf b_n = take(b + n, count), c_n = take(c + n, count);
        for (int r = 0; r < R; r++) {
            float* at = s + r * size + n;
            const vf v = fma(written[r], b_n, mul(kept, take(at, count)));
            put(at, v, count);
            total[r] = fma(v, c_n, total[r]);
        }
    });
    for (int r = 0; r < R; r++) out[r] = sum(total[r]) + skip * x[r];
}

template <class T>
void head(const Scan& d, const HeadRates& rates, const mill::StateSequence& seq, int64_t h,
          const T* xbc, const float* dt, float* state, float* out) {
    thread_local mill::Scratch scratch;
    float* x = scratch.get<float>(d.dim + 2 * d.size);
    float *b = x + d.dim, *c = b + d.size;
    const mill::HeadState s(seq, state, d.slot_stride, h, d.dim * d.size);
    const int64_t group = h / (d.heads / d.groups);
    for (int64_t i = 0; i < seq.count; i++) {
        const int64_t t = seq.start + i;
        const T* row = xbc + t * d.row_stride;
        mill::to_floats(x, row + h * d.dim, d.dim);
        mill::to_floats(b, row + d.heads * d.dim + group * d.size, d.size);
        mill::to_floats(c, row + d.heads * d.dim + (d.groups + group) * d.size, d.size);
        const double step = mill::softplus(dt[t * d.heads + h] + rates.bias);
        const double delta = step < d.least ? d.least : step > d.most ? d.most : step;
        const float decay = static_cast<float>(std::exp(-rates.rate * delta));
        const float write = static_cast<float>(delta);
        float* y = out + (t * d.heads + h) * d.dim;
        int64_t p = 0;
        for (; p + kRows <= d.dim; p += kRows)
            advance_rows<kRows>(s.own + p * d.size, x + p, b, c, d.size, decay, write, rates.skip,
                                y + p);
        for (; p < d.dim; p++)
            advance_rows<1>(s.own + p * d.size, x + p, b, c, d.size, decay, write, rates.skip,
                            y + p);
        s.keep_behind(i + 1);
    }
}

}  // namespace

// Shapes as in ops/ssd_scan.py; a_log, dt_bias and skip float32.
extern "C" void ssd_scan(float* out, const void* xbc, const float* dt, const float* a_log,
                         const float* dt_bias, const float* skip, float* state,
                         const int32_t* query_start, const int64_t* positions, const int64_t* slots,
                         const int64_t* snapshot_slots, const int64_t* snapshot_ends,
                         int64_t sequences, int64_t tokens, int64_t heads, int64_t groups,
                         int64_t dim, int64_t size, int64_t row_stride, int64_t slot_stride,
                         double least, double most, int dtype) {
    const mill::StateRows rows{query_start,    positions,     slots,
                               snapshot_slots, snapshot_ends, sequences};
    const Scan d{heads, groups, dim, size, row_stride, slot_stride, least, most};
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t work = tokens * heads * dim * size * 4;
        mill::for_each_part(rows, heads, work, [&](const mill::StateSequence& seq, int64_t h) {
            const HeadRates rates{std::exp(static_cast<double>(a_log[h])), dt_bias[h], skip[h]};
            head(d, rates, seq, h, static_cast<const T*>(xbc), dt, state, out);
        });
    });
}
