// Softmax attention of a block of query rows over a range of keys in a paged cache.
//
// Keys and values are taken 64 at a time: converted to float, the keys transposed, so that both products are the same
// register-blocked panel product, and read once for all query rows (and all query heads that share a KV head).
#pragma once
#include <limits>
#include <type_traits>

#include "simd.h"
#include "parallel_for.h"

namespace mill {

constexpr int64_t kTile = 64;  // keys at a time

// c[MR, NV·W] (+)= a[MR, k] · b[k, NV·W]; strides in floats.
template <int MR, int NV>
inline void panel(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                  bool accumulate) {
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
inline void panel_rows(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows,
                       int64_t k, bool accumulate) {
    int64_t m = 0;
    for (; m + 6 <= rows; m += 6) panel<6, NV>(c + m * ldc, ldc, a + m * lda, lda, b, ldb, k, accumulate);
    for (; m + 3 <= rows; m += 3) panel<3, NV>(c + m * ldc, ldc, a + m * lda, lda, b, ldb, k, accumulate);
    for (; m < rows; m++) panel<1, NV>(c + m * ldc, ldc, a + m * lda, lda, b, ldb, k, accumulate);
}

// cols: a multiple of W. Kept out of line: one copy serves every dtype, and compiles once.
__attribute__((noinline)) static void product(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t rows,
                    int64_t k, int64_t cols, bool accumulate) {
    constexpr int kWide = W == 16 ? 4 : 2;
    int64_t n = 0;
    for (; n + kWide * W <= cols; n += kWide * W)
        panel_rows<kWide>(c + n, ldc, a, lda, b + n, ldb, rows, k, accumulate);
    for (; n < cols; n += W) panel_rows<1>(c + n, ldc, a, lda, b + n, ldb, rows, k, accumulate);
}

// The cache of one layer. C: its element type; int8_t with a scale for each token and head.
template <class C> struct Pages {
    const C *k, *v;
    int64_t kv_heads, page_size, dim;
    const float *k_scale = nullptr, *v_scale = nullptr;
    int64_t place(const int32_t* table, int64_t kv_head, int64_t key) const {
        const int64_t page = table[key / page_size];
        return (page * kv_heads + kv_head) * page_size + key % page_size;
    }
};

// One thread's working memory: query rows, scores, output, a tile of keys [dim, kTile] and values [kTile, dim].
struct Workspace {
    float *q, *scores, *out, *keys, *values, *highest, *total;
    int64_t width;  // dim rounded up to whole vectors
    Workspace(Scratch& scratch, int64_t rows, int64_t dim) : width((dim + W - 1) / W * W) {
        float* p = scratch.get<float>(rows * (2 * width + kTile) + 2 * kTile * width + 2 * (rows + W));
        const auto next = [&p](int64_t count) { float* at = p; p += count; return at; };
        keys = next(width * kTile);
        values = next(kTile * width);
        q = next(rows * width);
        out = next(rows * width);
        scores = next(rows * kTile);
        highest = next(rows);
        total = next(rows);
    }
};

// Keys [first, first + count) of one KV head into keys (transposed, absent ones zero) and values.
template <class C>
__attribute__((noinline)) void gather(const Workspace& w, const Pages<C>& pages, const int32_t* table, int64_t kv_head, int64_t first,
                   int64_t count) {
    constexpr bool kScaled = std::is_same_v<C, int8_t>;
    const C *rows_k[kTile], *rows_v[kTile];
    float scale_k[kTile] = {}, scale_v[kTile];
    for (int64_t j = 0; j < count; j++) {
        const int64_t place = pages.place(table, kv_head, first + j);
        rows_k[j] = pages.k + place * pages.dim;
        rows_v[j] = pages.v + place * pages.dim;
        if constexpr (kScaled) {
            scale_k[j] = pages.k_scale[place];
            scale_v[j] = pages.v_scale[place];
        }
    }
    const int64_t columns = (count + W - 1) / W * W;
    each(pages.dim, [&](int64_t i, int c) {
        for (int64_t j = 0; j < columns; j += W) {
            vf square[W];
            for (int l = 0; l < W; l++) square[l] = j + l < count ? take(rows_k[j + l] + i, c) : zero();
            transpose(square);
            if constexpr (kScaled)
                for (int l = 0; l < c; l++) square[l] = mul(square[l], load(scale_k + j));
            for (int l = 0; l < c; l++) store(w.keys + (i + l) * kTile + j, square[l]);
        }
        for (int64_t j = 0; j < count; j++) {
            vf v = take(rows_v[j] + i, c);
            if constexpr (kScaled) v = mul(v, set1(scale_v[j]));
            store(w.values + j * w.width + i, v);
        }
    });
}

// Turns a row of scores into weights e^(s − highest) and keeps the running maximum and total; only columns
// [from, to) are seen. Returns the factor for what the row has gathered so far.
inline float soften(float* scores, int64_t from, int64_t to, int64_t columns, float* highest, float* total) {
    const float none = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < from && j < columns; j++) scores[j] = none;
    for (int64_t j = to < 0 ? 0 : to; j < columns; j++) scores[j] = none;
    vf most = set1(none);
    for (int64_t j = 0; j < columns; j += W) most = max(most, load(scores + j));
    const float before = *highest, now = std::fmax(before, top(most));
    if (now == none) {
        for (int64_t j = 0; j < columns; j += W) store(scores + j, zero());
        return 1.0f;
    }
    vf added = zero();
    for (int64_t j = 0; j < columns; j += W) {
        const vf e = exp(sub(load(scores + j), set1(now)));
        store(scores + j, e);
        added = add(added, e);
    }
    const float factor = std::exp(before - now);
    *highest = now;
    *total = *total * factor + sum(added);
    return factor;
}

// Which keys the rows see: row r sits at position start + r / group of its sequence and sees (position − window,
// position]; window 0 is no bound. Keys outside [first, last) are another block's.
struct KeyWindow {
    int64_t start, group, window, first, last;
};

// Nothing has been seen yet.
inline void clear(const Workspace& w, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        w.highest[r] = -std::numeric_limits<float>::infinity();
        w.total[r] = 0.0f;
    }
    std::memset(w.out, 0, static_cast<size_t>(rows * w.width) * sizeof(float));
}

// Row r's scores of the `count` keys from `key` on become weights; what the row has gathered so far is scaled to them.
inline void weigh(const Workspace& w, float* scores, int64_t r, int64_t key, int64_t count, const KeyWindow& seen) {
    const int64_t columns = (count + W - 1) / W * W;
    const int64_t p = seen.start + r / seen.group, from = seen.window > 0 ? p - seen.window + 1 - key : 0;
    const int64_t to = p + 1 - key < count ? p + 1 - key : count;
    const float factor = soften(scores, from, to, columns, w.highest + r, w.total + r);
    if (factor != 1.0f)
        for (int64_t i = 0; i < w.width; i += W)
            store(w.out + r * w.width + i, mul(load(w.out + r * w.width + i), set1(factor)));
}

// Query rows already in w.q (scaled); leaves unnormalised sums in w.out.
template <class C>
__attribute__((noinline)) void flash_attention(const Workspace& w, int64_t rows, const Pages<C>& pages, const int32_t* table,
                                      int64_t kv_head, const KeyWindow& seen) {
    clear(w, rows);
    for (int64_t key = seen.first; key < seen.last; key += kTile) {
        const int64_t count = seen.last - key < kTile ? seen.last - key : kTile, columns = (count + W - 1) / W * W;
        gather(w, pages, table, kv_head, key, count);
        product(w.scores, kTile, w.q, w.width, w.keys, kTile, rows, pages.dim, columns, false);
        for (int64_t r = 0; r < rows; r++) weigh(w, w.scores + r * kTile, r, key, count, seen);
        product(w.out, w.width, w.scores, kTile, w.values, w.width, rows, count, w.width, true);
    }
}

}  // namespace mill
