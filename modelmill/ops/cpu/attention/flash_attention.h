// FlashAttention for prefill: a block of query rows over a range of keys in a paged KV cache.
//
// Computes: softmax(q · Kᵀ) · V, online softmax, as two panel GEMMs
// Dtypes: cache float32, bfloat16, float16 or int8 with scales; float32 arithmetic
// Layout: pages [kv_heads, page_size, dim]; tiles of 64 keys converted to float, keys transposed
// Range: any number of query rows and keys
// Technique: register-blocked FMA panels (AVX-512, AVX2 or portable), thread pool
// Used by: flash_attention_small_m.h
//
// Tiles of 64 keys and values are converted to float and the keys transposed, so that both products
// are the same register-blocked panel GEMM; a tile is read once for all query rows and all query
// heads of a KV head.
#pragma once
#include <limits>
#include <type_traits>

#include "common/simd.h"
#include "common/parallel_for.h"

namespace mill {

constexpr int64_t kTile = 64;  // keys per tile

// c[MR, NV·W] (+)= a[MR, k] · b[k, NV·W]; strides in floats.
template <int MR, int NV>
inline void panel(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb,
                  int64_t k, bool accumulate) {
    vf acc[MR][NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) acc[m][n] = accumulate ? load(c + m * ldc + n * W) : zero();
    for (int64_t i = 0; i < k; i++) {
        vf bs[NV];
        for (int n = 0; n < NV; n++) bs[n] = load(b + i * ldb + n * W);
        for (int m = 0; m < MR; m++) {
            const vf x = set1(a[m * lda + i]);
            for (int n = 0; n < NV; n++) acc[m][n] = fma(x, bs[n], acc[m][n]);
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) store(c + m * ldc + n * W, acc[m][n]);
}

template <int NV>
inline void panel_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b,
                       int64_t ldb, int64_t rows, int64_t k, bool accumulate) {
    int64_t m = 0;
    for (; m + 6 <= rows; m += 6)
        panel<6, NV>(c + m * ldc, ldc, a + m * lda, lda, b, ldb, k, accumulate);
    for (; m + 3 <= rows; m += 3)
        panel<3, NV>(c + m * ldc, ldc, a + m * lda, lda, b, ldb, k, accumulate);
    for (; m < rows; m++) panel<1, NV>(c + m * ldc, ldc, a + m * lda, lda, b, ldb, k, accumulate);
}

// cols: a multiple of W. Kept out of line: one copy serves every dtype, and compiles once.
__attribute__((noinline)) static void matmul(float* c, int64_t ldc, const float* a, int64_t lda,
                                             const float* b, int64_t ldb, int64_t rows, int64_t k,
                                             int64_t cols, bool accumulate) {
    constexpr int kWide = W == 16 ? 4 : 2;
    int64_t n = 0;
    for (; n + kWide * W <= cols; n += kWide * W)
        panel_rows<kWide>(c + n, ldc, a, lda, b + n, ldb, rows, k, accumulate);
    for (; n < cols; n += W) panel_rows<1>(c + n, ldc, a, lda, b + n, ldb, rows, k, accumulate);
}

// The cache of one layer. C: its element type; int8_t with a scale for each token and head. Values
// are the first value_dim channels of a row of v, which may be k.
template <class C> struct Pages {
    const C *k, *v;
    int64_t kv_heads, page_size, dim, value_dim;
    const float *k_scale = nullptr, *v_scale = nullptr;
    int64_t index(const int32_t* table, int64_t kv_head, int64_t key) const {
        const int64_t page = table[key / page_size];
        return (page * kv_heads + kv_head) * page_size + key % page_size;
    }
};

// Per-thread workspace: query rows, scores, output, a tile of keys [dim, kTile] and values [kTile,
// value_dim].
struct Workspace {
    float *q, *scores, *out, *keys, *values, *row_max, *row_sum;
    int64_t width, value_width;  // dim and value_dim rounded up to whole vectors
    // Floats from one row of values or output to the next: rows 2 KiB apart would share few sets of
    // the first-level cache.
    int64_t value_stride;
    Workspace(Scratch& scratch, int64_t rows, int64_t dim, int64_t value_dim)
        : width((dim + W - 1) / W * W), value_width((value_dim + W - 1) / W * W),
          value_stride(value_width % 512 ? value_width : value_width + W) {
        float* p = scratch.get<float>((rows + kTile) * (width + value_stride) + rows * kTile +
                                      2 * (rows + W));
        const auto next = [&p](int64_t count) {
            float* at = p;
            p += count;
            return at;
        };
        keys = next(width * kTile);
        values = next(kTile * value_stride);
        q = next(rows * width);
        out = next(rows * value_stride);
        scores = next(rows * kTile);
        row_max = next(rows);
        row_sum = next(rows);
    }
};

// Loads keys [first, first + count) of one KV head to w.keys (transposed, zero-padded) and
// w.values.
template <class C>
__attribute__((noinline)) void gather_tile(const Workspace& w, const Pages<C>& pages,
                                           const int32_t* table, int64_t kv_head, int64_t first,
                                           int64_t count) {
    constexpr bool kScaled = std::is_same_v<C, int8_t>;
    const bool in_keys = pages.v == pages.k;  // values are stored before keys are transposed
    const C *rows_k[kTile], *rows_v[kTile];
    float scale_k[kTile] = {}, scale_v[kTile];
    for (int64_t j = 0; j < count; j++) {
        const int64_t index = pages.index(table, kv_head, first + j);
        rows_k[j] = pages.k + index * pages.dim;
        rows_v[j] = pages.v + index * pages.dim;
        if constexpr (kScaled) {
            scale_k[j] = pages.k_scale[index];
            scale_v[j] = pages.v_scale[index];
        }
    }
    const int64_t columns = (count + W - 1) / W * W;
    for_each_vector(pages.dim, [&](int64_t i, int c) {
        for (int64_t j = 0; j < columns; j += W) {
            vf square[W];
            for (int l = 0; l < W; l++)
                square[l] = j + l < count ? take(rows_k[j + l] + i, c) : zero();
            if (in_keys && i < pages.value_dim)
                for (int l = 0; l < W && j + l < count; l++)
                    store(w.values + (j + l) * w.value_stride + i,
                          kScaled ? mul(square[l], set1(scale_k[j + l])) : square[l]);
            transpose(square);
            if constexpr (kScaled)
                for (int l = 0; l < c; l++) square[l] = mul(square[l], load(scale_k + j));
            for (int l = 0; l < c; l++) store(w.keys + (i + l) * kTile + j, square[l]);
        }
    });
    if (in_keys) return;
    for_each_vector(pages.value_dim, [&](int64_t i, int c) {
        for (int64_t j = 0; j < count; j++) {
            vf v = take(rows_v[j] + i, c);
            if constexpr (kScaled) v = mul(v, set1(scale_v[j]));
            store(w.values + j * w.value_stride + i, v);
        }
    });
}

// Online softmax of one row: scores become e^(s − row_max) in place; updates row_max and row_sum;
// columns outside [from, to) are masked. Returns the factor for the accumulated output.
inline float online_softmax_row(float* scores, int64_t from, int64_t to, int64_t columns,
                                float* row_max, float* row_sum) {
    const float minus_infinity = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < from && j < columns; j++) scores[j] = minus_infinity;
    for (int64_t j = to < 0 ? 0 : to; j < columns; j++) scores[j] = minus_infinity;
    vf max_scores = set1(minus_infinity);
    for (int64_t j = 0; j < columns; j += W) max_scores = max(max_scores, load(scores + j));
    const float old_max = *row_max, new_max = std::fmax(old_max, reduce_max(max_scores));
    if (new_max == minus_infinity) {
        for (int64_t j = 0; j < columns; j += W) store(scores + j, zero());
        return 1.0f;
    }
    vf added = zero();
    for (int64_t j = 0; j < columns; j += W) {
        const vf e = exp(sub(load(scores + j), set1(new_max)));
        store(scores + j, e);
        added = add(added, e);
    }
    const float factor = std::exp(old_max - new_max);
    *row_max = new_max;
    *row_sum = *row_sum * factor + sum(added);
    return factor;
}

// Visible keys: row r is at position start + r / group of its sequence and sees (position − window,
// position]; window 0: no sliding window. Keys outside [first, last) belong to another task.
// softcap: bound of the scores, 0 for none. slopes: ALiBi's, of the group's heads, or null.
struct KeyWindow {
    int64_t start, group, window, first, last;
    float softcap = 0.0f;
    const float* slopes = nullptr;
};

// Resets the running maximum, sum and output.
inline void init_rows(const Workspace& w, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        w.row_max[r] = -std::numeric_limits<float>::infinity();
        w.row_sum[r] = 0.0f;
    }
    std::memset(w.out, 0, static_cast<size_t>(rows * w.value_stride) * sizeof(float));
}

// cap · tanh(score / cap). Near 0 the quotient of exponentials would lose the digits of x: there it
// is x − x³ / 3 + 2 x⁵ / 15, whose next term is below 6e-8 of x.
inline vf apply_softcap(vf score, float softcap) {
    constexpr float NEAR_ZERO = 0.01f;  // x² up to which it is
    const vf cap = set1(softcap), one = set1(1.0f), x = div(score, cap), square = mul(x, x);
    const vf series = fma(square, fma(square, set1(2.0f / 15), set1(-1.0f / 3)), one);
    const vf near_zero = mul(score, series);
    const vf e = exp(min(set1(40.0f), add(x, x)));  // beyond 40 the hyperbolic tangent is 1
    const vf far = mul(cap, div(sub(e, one), add(e, one)));
    return add(far, zero_below(sub(zero(), square), -NEAR_ZERO, sub(near_zero, far)));
}

// Scores of row r become softcap · tanh(score / softcap), then ALiBi is added: slope · distance.
inline void modify_scores(float* scores, int64_t r, int64_t key, int64_t columns,
                          const KeyWindow& window) {
    if (window.softcap > 0.0f) {
        for (int64_t j = 0; j < columns; j += W)
            store(scores + j, apply_softcap(load(scores + j), window.softcap));
    }
    if (window.slopes) {
        const float slope = window.slopes[r % window.group];
        const int64_t first = key - window.start - r / window.group;
        for (int64_t j = 0; j < columns; j++) scores[j] += slope * static_cast<float>(first + j);
    }
}

// Masks and exponentiates row r's scores of `count` keys from `key` on, and rescales its output.
inline void update_row(const Workspace& w, float* scores, int64_t r, int64_t key, int64_t count,
                       const KeyWindow& window) {
    const int64_t columns = (count + W - 1) / W * W;
    const int64_t p = window.start + r / window.group,
                  from = window.window > 0 ? p - window.window + 1 - key : 0;
    const int64_t to = p + 1 - key < count ? p + 1 - key : count;
    if (window.softcap > 0.0f || window.slopes) modify_scores(scores, r, key, columns, window);
    const float factor =
        online_softmax_row(scores, from, to, columns, w.row_max + r, w.row_sum + r);
    if (factor != 1.0f)
        for (int64_t i = 0; i < w.value_width; i += W) {
            float* sums = w.out + r * w.value_stride + i;
            store(sums, mul(load(sums), set1(factor)));
        }
}

// Query rows are in w.q (scaled); leaves the unnormalized output in w.out.
template <class C>
__attribute__((noinline)) void flash_attention(const Workspace& w, int64_t rows,
                                               const Pages<C>& pages, const int32_t* table,
                                               int64_t kv_head, const KeyWindow& window) {
    init_rows(w, rows);
    for (int64_t key = window.first; key < window.last; key += kTile) {
        const int64_t count = window.last - key < kTile ? window.last - key : kTile,
                      columns = (count + W - 1) / W * W;
        gather_tile(w, pages, table, kv_head, key, count);
        matmul(w.scores, kTile, w.q, w.width, w.keys, kTile, rows, pages.dim, columns, false);
        for (int64_t r = 0; r < rows; r++)
            update_row(w, w.scores + r * kTile, r, key, count, window);
        matmul(w.out, w.value_stride, w.scores, kTile, w.values, w.value_stride, rows, count,
               w.value_width, true);
    }
}

}  // namespace mill
