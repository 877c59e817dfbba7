// Small-M GEMM.
//
// Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ
// Dtypes: x and out float32, bfloat16 or float16; weights of those types, int8 or e4m3; float32
//     accumulators
// Layout: row-major
// Range: any M, tuned for M ≤ 16
// Technique: AVX-512 or AVX2 FMA, AVX512_BF16 dot products, register blocking, software
//     prefetch
// Used by: gemm_large_m.h
//
// Each output is one chain of multiply-adds along K and one final reduction, whatever the blocking,
// so that a row gives the same bits alone and in a batch. Register blocking of up to 6 rows of x by
// 8 weight rows; weights are streamed with software prefetch, or on AVX2 from rows far apart
// (weight_stream.h).
#pragma once
#include "common/simd.h"
#include "common/weight_stream.h"
#include "common/parallel_for.h"

namespace mill {

constexpr int64_t kInputBlock = 192 << 10;  // bytes of activations per block (L2)
constexpr bool kFarRows = W == 8;           // up to kFarRowsLimit rows of activations
constexpr int64_t kFarRowsLimit = 16;

// Dot product traits: weights of type T and activations as floats. A step covers kStep columns in
// kParts vectors. FloatFma: what those with float products share.
struct FloatFma {
    using Input = float;
    using Vector = vf;
    static Vector input(const float* p) { return load(p); }
    static vf accumulate(Vector w, Vector x, vf acc) { return fma(w, x, acc); }
};

template <class T> struct FloatDot : FloatFma {
    using Weight = T;
    static constexpr int kParts = 1, kStep = W;
    static Vector weight(const T* p, int n, int) { return take(p, n); }
    template <class X> static void pack(float* out, const X* x) { store(out, load(x)); }
};

#if defined(MILL_AVX512)
// bfloat16 is the upper half of a float: the even columns of a vector are shifted, the odd ones
// masked. The activations are packed in that order once.
struct Bf16SplitDot : FloatFma {
    using Weight = bf16;
    static constexpr int kParts = 2, kStep = 2 * W;
    static Vector weight(const bf16* p, int n, int part) {
        const __m512i raw =
            n == kStep ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1u, p);
        return _mm512_castsi512_ps(part ? _mm512_and_si512(raw, _mm512_set1_epi32(-65536))
                                        : _mm512_slli_epi32(raw, 16));
    }
    static void pack(float* out, const bf16* x) {
        for (int part = 0; part < kParts; part++) store(out + part * W, weight(x, kStep, part));
    }
};
#endif

// Not if float FMAs are faster (MILL_BF16_AS_FP32: build.native_compiler_flags).
#if defined(MILL_BF16) && !defined(MILL_BF16_AS_FP32)
// Pairs of bfloat16, multiplied exactly and summed in float by one instruction.
struct Bf16PairDot {
    using Weight = bf16;
    using Input = bf16;
    using Vector = __m512i;
    static constexpr int kParts = 1, kStep = 2 * W;
    static Vector input(const bf16* p) { return _mm512_loadu_si512(p); }
    static Vector weight(const bf16* p, int n, int) {
        return n == kStep ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1u, p);
    }
    static void pack(bf16* out, const bf16* x) { std::memcpy(out, x, kStep * sizeof(bf16)); }
    static vf accumulate(Vector w, Vector x, vf acc) {
        return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
    }
};
// Bytes become bfloat16, which holds them exactly, in registers.
struct Int8AsBf16Dot : Bf16PairDot {
    using Weight = int8_t;
    static Vector weight(const int8_t* p, int n, int) {
        const vf low = n >= W ? load(p) : load_n(p, n);
        const vf high = n == kStep ? load(p + W) : n > W ? load_n(p + W, n - W) : zero();
        return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    }
};
template <class T>
using DotTraits = std::conditional_t<std::is_same_v<T, bf16>, Bf16PairDot, FloatDot<T>>;
template <class T>
using Int8DotTraits = std::conditional_t<std::is_same_v<T, bf16>, Int8AsBf16Dot, FloatDot<int8_t>>;
#else
#    if defined(MILL_AVX512)
template <class T>
using DotTraits = std::conditional_t<std::is_same_v<T, bf16>, Bf16SplitDot, FloatDot<T>>;
#    else
template <class T> using DotTraits = FloatDot<T>;
#    endif
template <class T> using Int8DotTraits = FloatDot<int8_t>;
#endif

// Packs activations for the kernel: rows padded with zeros to whole steps, columns in the kernel's
// order.
template <class H> inline int64_t padded(int64_t k) {
    return (k + H::kStep - 1) / H::kStep * H::kStep;
}

template <class H, class X>
inline const typename H::Input* pack_inputs(Scratch& scratch, const X* x, int64_t rows, int64_t k) {
    using Input = typename H::Input;
    const int64_t stride = padded<H>(k);
    if constexpr (std::is_same_v<Input, X>)  // then pack() copies
        if (stride == k) return x;
    Input* out = scratch.get<Input>(rows * stride);
    for (int64_t m = 0; m < rows; m++) {
        Input* row = out + m * stride;
        const X* begin = x + m * k;
        int64_t i = 0;
        for (; i + H::kStep <= k; i += H::kStep) H::pack(row + i, begin + i);
        if (i == k) continue;
        X rest[H::kStep];
        std::memset(static_cast<void*>(rest), 0, sizeof rest);
        std::memcpy(static_cast<void*>(rest), begin + i, static_cast<size_t>(k - i) * sizeof(X));
        H::pack(row + i, rest);
    }
    return out;
}

// MB activation rows x NB weight rows, `pitch` elements apart. sums: [MB][NB].
template <class H, int MB, int NB>
__attribute__((noinline)) void dot_block(float* sums, const typename H::Input* x, int64_t stride,
                                         const typename H::Weight* w, int64_t k, int64_t pitch) {
    constexpr int kLine = 64 / sizeof(typename H::Weight);
    vf acc[MB][NB];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < NB; n++) acc[m][n] = zero();
    const int64_t distance =
        prefetch_distance<MB>(NB * k * static_cast<int64_t>(sizeof(typename H::Weight)));
    int64_t i = 0;
    const auto step = [&](int count) {
        for (int part = 0; part < H::kParts; part++) {
            typename H::Vector xs[MB];
            for (int m = 0; m < MB; m++) xs[m] = H::input(x + m * stride + i + part * W);
            for (int n = 0; n < NB; n++) {
                const auto weight = H::weight(w + n * pitch + i, count, part);
                for (int m = 0; m < MB; m++) acc[m][n] = H::accumulate(weight, xs[m], acc[m][n]);
            }
        }
        i += H::kStep;
    };
    while (i + kLine <= k) {
        for (int n = 0; n < NB && !kFarRows; n++)
            prefetch_line<MB>(reinterpret_cast<const char*>(w + n * pitch + i) + distance);
        for (int j = 0; j < kLine / H::kStep; j++) step(H::kStep);
    }
    while (i + H::kStep <= k) step(H::kStep);
    if (i < k) step(static_cast<int>(k - i));
    sums_of(sums, &acc[0][0], MB * NB);
}

template <class H, int MB, int NB, class StoreOut>
inline void dot_columns(const typename H::Input* x, const typename H::Weight* w, int64_t k,
                        int64_t m0, int64_t n0, const StoreOut& store_out) {
    float sums[MB * NB];
    const int64_t stride = padded<H>(k);
    dot_block<H, MB, NB>(sums, x + m0 * stride, stride, w + n0 * k, k, k);
    for (int m = 0; m < MB; m++) store_out(m0 + m, n0, sums + m * NB, NB);
}

// Activation rows [m, last) for NB weight rows, six at a time where there are 32 registers, else
// four.
template <class H, int NB, class StoreOut>
inline void dot_rows(const typename H::Input* x, int64_t m, int64_t last,
                     const typename H::Weight* w, int64_t k, int64_t n0,
                     const StoreOut& store_out) {
    if constexpr (W == 16)
        for (; m + 6 <= last; m += 6) dot_columns<H, 6, NB>(x, w, k, m, n0, store_out);
    for (; m + 4 <= last; m += 4) dot_columns<H, 4, NB>(x, w, k, m, n0, store_out);
    if (last - m == 3)
        dot_columns<H, 3, NB>(x, w, k, m, n0, store_out);
    else if (last - m == 2)
        dot_columns<H, 2, NB>(x, w, k, m, n0, store_out);
    else if (last - m == 1)
        dot_columns<H, 1, NB>(x, w, k, m, n0, store_out);
}

// Activation rows that stay in L2 while weight rows are streamed.
template <class H> inline int64_t block_rows(int64_t k) {
    return (kInputBlock / (padded<H>(k + 1) * static_cast<int64_t>(sizeof(typename H::Input))) /
                12 +
            1) *
           12;
}

// Weight rows [from, to) for activation rows [m, last), at most a block; put_out(m, n, sums, count)
// receives the results of a row m for columns n to n + count.
template <class H, class StoreOut>
inline void dot_range(const typename H::Input* x, int64_t m, int64_t last,
                      const typename H::Weight* w, int64_t k, int64_t begin, int64_t to,
                      const StoreOut& store_out) {
    // accumulators that fit the registers beside the activation rows
    constexpr int kColumns = W == 16 ? 4 : 2;
    if (last - m == 1) {
        for (; begin + 8 <= to; begin += 8) dot_columns<H, 1, 8>(x, w, k, m, begin, store_out);
    }
    for (; begin + kColumns <= to; begin += kColumns)
        dot_rows<H, kColumns>(x, m, last, w, k, begin, store_out);
    for (; begin < to; begin++) dot_rows<H, 1>(x, m, last, w, k, begin, store_out);
}

// Weight rows [from, to) for all of a few activation rows: rows far apart at a time.
template <class H, class StoreOut>
inline void dot_far_rows(const typename H::Input* x, int64_t rows, const typename H::Weight* w,
                         int64_t k, int64_t from, int64_t to, const StoreOut& store_out) {
    thread_local Scratch scratch;
    const int64_t columns = to - from, stride = padded<H>(k);
    float* sums = scratch.get<float>(rows * columns);
    const auto dot_rows_at = [&](int64_t j, int64_t pitch, auto count) {
        constexpr int NB = decltype(count)::value;
        const auto block = [&](int64_t m, auto row_count) {
            constexpr int MB = decltype(row_count)::value;
            float some[MB * NB];
            dot_block<H, MB, NB>(some, x + m * stride, stride, w + (from + j) * k, k, pitch * k);
            for (int i = 0; i < MB * NB; i++)
                sums[(m + i / NB) * columns + j + i % NB * pitch] = some[i];
        };
        int64_t m = 0;
        if constexpr (NB < 8) {
            for (; m + 4 <= rows; m += 4) block(m, std::integral_constant<int, 4>{});
            for (; m + 2 <= rows; m += 2) block(m, std::integral_constant<int, 2>{});
        }
        if (m < rows) block(m, std::integral_constant<int, 1>{});
    };
    if (rows == 1)
        for_far_rows<8>(columns, dot_rows_at);
    else
        for_far_rows<2>(columns, dot_rows_at);
    for (int64_t m = 0; m < rows; m++)
        store_out(m, from, sums + m * columns, static_cast<int>(columns));
}

// The whole GEMM over all threads, in blocks of activation rows by weight rows; adjacent blocks
// share the activations. X: type of the activations.
template <class H, class X, class StoreOut>
inline void multiply_small_m(const X* x, const typename H::Weight* w, int64_t rows, int64_t k,
                             int64_t n, const StoreOut& store_out) {
    thread_local Scratch scratch;
    const auto* input = pack_inputs<H>(scratch, x, rows, k);
    const int64_t bytes = (k > 0 ? k : 1) * static_cast<int64_t>(sizeof(typename H::Weight));
    if constexpr (kFarRows) {
        if (rows <= kFarRowsLimit) {
            const int64_t step = far_chunk_rows(n, bytes, 1);
            parallel_for(n, step, n * bytes * (rows + 3) / 4, [&](int64_t from, int64_t end) {
                for (; from < end; from += step)
                    dot_far_rows<H>(input, rows, w, k, from, from + step < end ? from + step : end,
                                    store_out);
            });
            return;
        }
    }
    const int64_t block = block_rows<H>(k), blocks = (rows + block - 1) / block;
    int64_t chunk_bytes = rows > 16 ? 256 << 10 : 64 << 10;
    const int64_t max_chunk_bytes = n * bytes * blocks / 16;  // enough blocks for load balancing
    if (chunk_bytes > max_chunk_bytes) chunk_bytes = max_chunk_bytes;
    const int64_t step = (chunk_bytes / bytes / 8 + 1) * 8;
    parallel_for_tiles(rows, block, n, step, n * bytes * (rows + 3) / 4,
                       [&](int64_t m, int64_t last, int64_t from, int64_t to) {
                           dot_range<H>(input, m, last, w, k, from, to, store_out);
                       });
}

// Stores sums of a product as `out` [rows, n], with bias [n] added (null: none).
// scaled(sums, m, j, count): the sums of row m in columns j … with their scales.
template <class T, class Scaled>
inline auto store_with_bias(T* out, const T* bias, int64_t n, const Scaled& scaled) {
    return [=](int64_t m, int64_t first, const float* sums, int count) {
        for_each_vector(count, [&](int64_t i, int c) {
            const int64_t j = first + i;
            const vf some = scaled(take(sums + i, c), m, j, c);
            put(out + m * n + j, bias ? add(some, take(bias + j, c)) : some, c);
        });
    };
}

}  // namespace mill
