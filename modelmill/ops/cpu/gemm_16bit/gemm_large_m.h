// GEMM of any M, of many rows by panels of weights.
//
// Computes: out[M, N] = x[M, K] · weight[N, K]ᵀ
// Dtypes: those of gemm_small_m.h
// Layout: row-major; panels as the kernel reads them
// Range: any M; panels from kMinPanelRows rows on
// Technique: FMA, AVX512_BF16 dot products, panels in L2, register blocking
// Used by: e4m3.h, groupwise.h, int8_linear.cpp, linear.cpp, router_gemm.cpp
//
// A thread converts some weight rows to the vectors that are multiplied, once for all rows of x,
// and lays them in the order in which the inner loop reads them. The rows of x then pass by, a few
// at a time. An output is the same chain of multiply-adds and the same reduction as in
// gemm_small_m.h, so that a row gives the same bits alone and in a batch.
#pragma once
#include <algorithm>

#include "gemm_16bit/gemm_small_m.h"

namespace mill {

constexpr int64_t kMinPanelRows = 17;
constexpr int64_t kPanelBytes =
    W == 16 ? 512 << 10 : 256 << 10;            // half of L2, or all of a small one
constexpr int64_t kPanelInputBytes = 8 << 20;   // rows of x that pass by all panels: in L3
constexpr int kPanelRows = W == 16 ? 6 : 4;     // of x: with kPanelColumns they fill the registers
constexpr int kPanelColumns = W == 16 ? 4 : 2;  // weight rows
constexpr int64_t kMaxPanelColumns = 64, kTilesPerThread = 8, kMinTileRows = 48;

// Bytes that become floats for each few rows of x cost less than four times as many bytes from L2.
template <class H> constexpr bool kConvertsInRegisters = std::is_same_v<H, FloatDot<int8_t>>;

// Weight rows [from, to) as vectors: for each group of kPanelColumns rows those of all steps, of a
// step one vector a row. The last group repeats the last row. row_at(row): its k weights, which are
// read before the next call.
template <class H, class RowAt>
inline void pack_panel(typename H::Vector* panel, int64_t from, int64_t to, int64_t k,
                       const RowAt& row_at) {
    const int64_t row_vectors = padded<H>(k) / H::kStep * H::kParts;
    for (int64_t first = from; first < to; first += kPanelColumns) {
        for (int j = 0; j < kPanelColumns; j++) {
            const typename H::Weight* row = row_at(std::min(first + j, to - 1));
            typename H::Vector* out = panel + j;
            for (int64_t i = 0; i < k; i += H::kStep) {
                const int count = static_cast<int>(std::min<int64_t>(H::kStep, k - i));
                for (int part = 0; part < H::kParts; part++, out += kPanelColumns)
                    *out = H::weight(row + i, count, part);
            }
        }
        panel += row_vectors * kPanelColumns;
    }
}

// MB rows of x times a group of a panel. sums: [MB][pitch].
template <class H, int MB>
__attribute__((noinline)) void panel_block(float* sums, int64_t pitch, const typename H::Input* x,
                                           int64_t stride, const typename H::Vector* panel,
                                           int64_t row_vectors) {
    vf acc[MB][kPanelColumns];
    for (int m = 0; m < MB; m++)
        for (int n = 0; n < kPanelColumns; n++) acc[m][n] = zero();
    for (int64_t i = 0; i < row_vectors; i++) {
        typename H::Vector xs[MB];
        for (int m = 0; m < MB; m++) xs[m] = H::input(x + m * stride + i * (H::kStep / H::kParts));
        for (int n = 0; n < kPanelColumns; n++) {
            const auto weight = panel[i * kPanelColumns + n];
            for (int m = 0; m < MB; m++) acc[m][n] = H::accumulate(weight, xs[m], acc[m][n]);
        }
    }
    for (int m = 0; m < MB; m++) sums_of(sums + m * pitch, acc[m], kPanelColumns);
}

// Rows [m, last) of x for a panel of `columns` weight rows, the first of which is n0.
template <class H, class StoreOut>
inline void multiply_panel(const typename H::Input* x, int64_t m, int64_t last,
                           const typename H::Vector* panel, int64_t k, int64_t n0, int64_t columns,
                           const StoreOut& store_out) {
    const int64_t stride = padded<H>(k), row_vectors = stride / H::kStep * H::kParts;
    float sums[kPanelRows * kMaxPanelColumns];
    const auto pass = [&](auto count) {
        constexpr int MB = decltype(count)::value;
        for (int64_t n = 0; n < columns; n += kPanelColumns)
            panel_block<H, MB>(sums + n, kMaxPanelColumns, x + m * stride, stride,
                               panel + n * row_vectors, row_vectors);
        for (int i = 0; i < MB; i++)
            store_out(m + i, n0, sums + i * kMaxPanelColumns, static_cast<int>(columns));
        m += MB;
    };
    while (m + kPanelRows <= last) pass(std::integral_constant<int, kPanelRows>{});
    if (last - m >= 4) pass(std::integral_constant<int, 4>{});
    if (last - m >= 2) pass(std::integral_constant<int, 2>{});
    if (last - m == 1) pass(std::integral_constant<int, 1>{});
}

// Calls f(m, last, from, to) over all threads for rows [m, last) of x and a panel of weight rows
// [from, to). input_row_bytes, panel_row_bytes: of a row of x, and of a weight row in a panel.
template <class F>
inline void for_panels(int64_t rows, int64_t input_row_bytes, int64_t n, int64_t panel_row_bytes,
                       const F& f) {
    const int64_t fitting =
        std::min(kPanelBytes / panel_row_bytes, n / (kTilesPerThread * threads()));
    // whole vectors of outputs
    const int64_t columns = std::clamp<int64_t>(fitting / 16 * 16, 16, kMaxPanelColumns);
    const int64_t panels = (n + columns - 1) / columns;
    int64_t blocks = rows * input_row_bytes / kPanelInputBytes + 1;
    while (blocks * panels < kTilesPerThread * threads() && rows / (2 * blocks) >= kMinTileRows)
        blocks *= 2;
    const int64_t block = (rows + blocks - 1) / blocks;
    parallel_for_tiles(rows, (block + kPanelRows - 1) / kPanelRows * kPanelRows, n, columns,
                       n * panel_row_bytes, f);
}

// Vectors of a panel of weight rows [from, to), in groups of kPanelColumns.
inline int64_t panel_vectors(int64_t from, int64_t to, int64_t row_vectors) {
    return (to - from + kPanelColumns - 1) / kPanelColumns * kPanelColumns * row_vectors;
}

// The whole GEMM over all threads. pack(panel, from, to) converts weight rows [from, to), as
// pack_panel does. X: type of the activations; store_out: as in gemm_small_m.h.
template <class H, class X, class Pack, class StoreOut>
inline void multiply_panels(const X* x, int64_t rows, int64_t k, int64_t n, const Pack& pack,
                            const StoreOut& store_out) {
    using Vector = typename H::Vector;
    using Input = typename H::Input;
    thread_local Scratch input_scratch;
    const auto* input = pack_inputs<H>(input_scratch, x, rows, k);
    const int64_t stride = padded<H>(k), row_vectors = stride / H::kStep * H::kParts;
    for_panels(rows, stride * static_cast<int64_t>(sizeof(Input)), n,
               row_vectors * static_cast<int64_t>(sizeof(Vector)),
               [&](int64_t m, int64_t last, int64_t from, int64_t to) {
                   thread_local Scratch scratch;
                   auto* panel = scratch.get<Vector>(panel_vectors(from, to, row_vectors));
                   pack(panel, from, to);
                   multiply_panel<H>(input, m, last, panel, k, from, to - from, store_out);
               });
}

// The whole GEMM over all threads; put_out as in gemm_small_m.h. X: type of the activations.
template <class H, class X, class StoreOut>
inline void multiply(const X* x, const typename H::Weight* w, int64_t rows, int64_t k, int64_t n,
                     const StoreOut& store_out) {
    if (rows >= kMinPanelRows && k > 0 && !kConvertsInRegisters<H>)
        multiply_panels<H>(
            x, rows, k, n,
            [&](typename H::Vector* panel, int64_t from, int64_t to) {
                pack_panel<H>(panel, from, to, k, [&](int64_t row) { return w + row * k; });
            },
            store_out);
    else
        multiply_small_m<H>(x, w, rows, k, n, store_out);
}

}  // namespace mill
