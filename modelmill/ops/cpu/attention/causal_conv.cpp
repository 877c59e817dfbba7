// Short causal convolution of each channel, with or without SiLU behind it.
//
// Computes: out[T, C] = convolution of x[T, C'] + bias, or SiLU of it, the last inputs of each
//     sequence [W − 1, C], and a snapshot of them
// Dtypes: x, state, weight and bias float32, bfloat16 or float16, all the same; float32 arithmetic
// Layout: rows of x with a stride; states by slot, read and written in place
// Range: any width and number of channels
// Technique: SIMD (simd.h), thread pool over sequences and blocks of channels
// Ops: causal_conv
#include "attention/state_rows.h"

namespace {

constexpr int64_t kChannels = 512;  // of a block

template <class T> struct Conv {
    T* out;
    const T *x, *weight, *bias;
    T* state;
    int64_t channels, width, row_stride, slot_stride;
    bool silu;
};

// Rows of the state, then of x, by their index among both; null: zeros in front of the sequence.
template <class T>
const T* window(const Conv<T>& d, const mill::StateSequence& seq, int64_t index) {
    const int64_t before = d.width - 1;
    if (index >= before) return d.x + (seq.start + index - before) * d.row_stride;
    return seq.first == 0 ? nullptr : d.state + seq.slot * d.slot_stride + index * d.channels;
}

// Copies the inputs behind so many tokens of the step to a slot, which may be the sequence's own.
template <class T>
void keep(const Conv<T>& d, const mill::StateSequence& seq, int64_t tokens, int64_t slot,
          int64_t from, int64_t count) {
    for (int64_t r = 0; r < d.width - 1; r++) {
        T* target = d.state + slot * d.slot_stride + r * d.channels + from;
        const size_t bytes = static_cast<size_t>(count) * sizeof(T);
        if (const T* source = window(d, seq, tokens + r))
            std::memmove(target, source + from, bytes);
        else
            std::memset(target, 0, bytes);
    }
}

template <class T>
void block(const Conv<T>& d, const mill::StateSequence& seq, int64_t from, int64_t count) {
    using namespace mill;
    thread_local Scratch scratch;
    float* factors = scratch.get<float>(d.width * kChannels);  // [width, channels of the block]
    for (int64_t c = 0; c < count; c++)
        for (int64_t j = 0; j < d.width; j++)
            factors[j * kChannels + c] = to_float(d.weight[(from + c) * d.width + j]);
    for (int64_t t = 0; t < seq.count; t++) {
        T* out = d.out + (seq.start + t) * d.channels + from;
        for_each_vector(count, [&](int64_t c, int n) {
            vf total = zero();
            for (int64_t j = 0; j < d.width; j++)
                if (const T* row = window(d, seq, t + j))
                    total =
                        fma(take(row + from + c, n), take(factors + j * kChannels + c, n), total);
            if (d.bias) total = add(total, take(d.bias + from + c, n));
            if (d.silu) total = div(total, add(set1(1.0f), exp(sub(zero(), total))));
            put(out + c, total, n);
        });
    }
    if (seq.kept >= 0 && seq.kept <= seq.count)
        keep(d, seq, seq.kept, seq.snapshot_slot, from, count);
    keep(d, seq, seq.count, seq.slot, from, count);
}

}  // namespace

// Shapes as in ops/causal_conv.py; bias may be null.
extern "C" void causal_conv(void* out, const void* x, const void* weight, const void* bias,
                            void* state, const int32_t* query_start, const int64_t* positions,
                            const int64_t* slots, const int64_t* snapshot_slots,
                            const int64_t* snapshot_ends, int64_t sequences, int64_t tokens,
                            int64_t channels, int64_t width, int64_t row_stride,
                            int64_t slot_stride, int dtype, int silu) {
    const mill::StateRows rows{query_start,    positions,     slots,
                               snapshot_slots, snapshot_ends, sequences};
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Conv<T> d{static_cast<T*>(out),
                        static_cast<const T*>(x),
                        static_cast<const T*>(weight),
                        static_cast<const T*>(bias),
                        static_cast<T*>(state),
                        channels,
                        width,
                        row_stride,
                        slot_stride,
                        silu != 0};
        const int64_t parts = (channels + kChannels - 1) / kChannels;
        const int64_t work = tokens * channels * width * 4;
        mill::for_each_part(rows, parts, work, [&](const mill::StateSequence& seq, int64_t part) {
            const int64_t from = part * kChannels, left = channels - from;
            block(d, seq, from, left < kChannels ? left : kChannels);
        });
    });
}
