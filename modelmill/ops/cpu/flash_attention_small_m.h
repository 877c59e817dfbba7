// Attention of a few query rows (a token at decode: its heads of one KV head) over a range of keys in a paged cache.
//
// Keys and values are read where they lie: four keys at a time against all rows, then values weighted and added up in
// registers. Turning a tile for a panel product, as flash_attention.h does, would take longer than the product of a few rows.
#pragma once
#include "flash_attention.h"

namespace mill {

constexpr int64_t kFewRows = 8;     // up to so many rows this is faster than attend()
constexpr int64_t kFewKeys = 256;   // at a time
constexpr int64_t kKeysAhead = 16;  // asked for before they are read

// Where the keys and values lie, and in 8 bits their scales.
template <class C> struct Places {
    const C *k[kFewKeys], *v[kFewKeys];
    float k_scale[kFewKeys], v_scale[kFewKeys];
    int64_t count = 0;

    // Keys [first, first + keys) of a KV head; up to a whole vector of them the rest stand on the last.
    void find(const Pages<C>& pages, const int32_t* table, int64_t kv_head, int64_t first, int64_t keys) {
        count = keys;
        int64_t page = first / pages.page_size, inside = first % pages.page_size;
        int64_t place = pages.place(table, kv_head, first);
        for (int64_t j = 0; j < (keys + W - 1) / W * W; j++) {
            k[j] = pages.k + place * pages.dim;
            v[j] = pages.v + place * pages.dim;
            if constexpr (std::is_same_v<C, int8_t>) {
                k_scale[j] = pages.k_scale[place];
                v_scale[j] = pages.v_scale[place];
            }
            if (j + 1 >= keys) continue;
            place++;
            if (++inside == pages.page_size) {
                inside = 0;
                place = (table[++page] * pages.kv_heads + kv_head) * pages.page_size;
            }
        }
    }
};

// The lines of a key or value, asked for.
template <class C> inline void prefetch_line(const C* row, int64_t dim) {
    for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(C)); byte += 64)
        prefetch(reinterpret_cast<const char*>(row) + byte);
}

// Rows that end with a whole vector have loops of their own: with a branch in them compilers keep the sums in memory.

// scores[MR][kFewKeys] of four keys from j.
template <int MR, bool kWhole, class C>
__attribute__((always_inline)) inline void four_scores(float* scores, const float* q, int64_t width,
                                                       const Places<C>& places, int64_t j, int64_t dim) {
    vf acc[MR][4];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < 4; n++) acc[m][n] = zero();
    for (int64_t i = 0; i < dim; i += W) {
        vf keys[4];
        for (int n = 0; n < 4; n++) {
            if constexpr (kWhole) keys[n] = load(places.k[j + n] + i);
            else keys[n] = take(places.k[j + n] + i, static_cast<int>(dim - i < W ? dim - i : W));
        }
        for (int m = 0; m < MR; m++) {
            const vf x = load(q + m * width + i);
            for (int n = 0; n < 4; n++) acc[m][n] = fma(keys[n], x, acc[m][n]);
        }
    }
    for (int m = 0; m < MR; m++) sums_of(scores + m * kFewKeys + j, acc[m], 4);
}

template <int MR, class C>
__attribute__((noinline)) void small_m_scores(float* scores, const float* q, int64_t width, const Places<C>& places,
                                          int64_t dim) {
    for (int64_t j = 0; j < places.count; j += 4) {
        for (int64_t n = j; n < j + 4; n++) {
            if (n + kKeysAhead < places.count) prefetch_line(places.k[n + kKeysAhead], dim);
            prefetch_line(places.v[n], dim);
        }
        if (dim % W == 0) four_scores<MR, true>(scores, q, width, places, j, dim);
        else four_scores<MR, false>(scores, q, width, places, j, dim);
    }
}

// out[MR][width] += weights[MR][kFewKeys] · values: NV vectors from column i, or the `c` columns that are left.
template <int MR, int NV, bool kWhole, class C>
__attribute__((always_inline)) inline void add_values(float* out, int64_t width, const float* weights,
                                                      const Places<C>& places, int64_t i, int c) {
    vf acc[MR][NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) acc[m][n] = load(out + m * width + i + n * W);
    for (int64_t j = 0; j < places.count; j++) {
        vf values[NV];
        for (int n = 0; n < NV; n++) {
            if constexpr (kWhole) values[n] = load(places.v[j] + i + n * W);
            else values[n] = load_n(places.v[j] + i, c);
        }
        for (int m = 0; m < MR; m++) {
            const vf x = set1(weights[m * kFewKeys + j]);
            for (int n = 0; n < NV; n++) acc[m][n] = fma(x, values[n], acc[m][n]);
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) store(out + m * width + i + n * W, acc[m][n]);
}

template <int MR, class C>
__attribute__((noinline)) void small_m_values(float* out, int64_t width, const float* weights, const Places<C>& places,
                                          int64_t dim) {
    constexpr int kWide = W == 16 ? 4 : 2;
    int64_t i = 0;
    for (; i + kWide * W <= dim; i += kWide * W) add_values<MR, kWide, true>(out, width, weights, places, i, W);
    for (; i + W <= dim; i += W) add_values<MR, 1, true>(out, width, weights, places, i, W);
    if (i < dim) add_values<MR, 1, false>(out, width, weights, places, i, static_cast<int>(dim - i));
}

// f(std::integral_constant<int, MR>, m) for all rows, at most four at a time.
template <class F> inline void for_row_blocks(int64_t rows, const F& f) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) f(std::integral_constant<int, 4>(), m);
    if (rows - m == 3) f(std::integral_constant<int, 3>(), m);
    else if (rows - m == 2) f(std::integral_constant<int, 2>(), m);
    else if (rows - m == 1) f(std::integral_constant<int, 1>(), m);
}

// As attend().
template <class C>
void flash_attention_small_m(const Workspace& w, int64_t rows, const Pages<C>& pages, const int32_t* table, int64_t kv_head,
                const KeyWindow& seen) {
    constexpr bool kScaled = std::is_same_v<C, int8_t>;
    alignas(64) float scores[kFewRows * kFewKeys];
    Places<C> places;
    clear(w, rows);
    for (int64_t key = seen.first; key < seen.last; key += kFewKeys) {
        places.find(pages, table, kv_head, key, seen.last - key < kFewKeys ? seen.last - key : kFewKeys);
        for_row_blocks(rows, [&](auto mr, int64_t m) {
            small_m_scores<mr>(scores + m * kFewKeys, w.q + m * w.width, w.width, places, pages.dim);
        });
        for (int64_t r = 0; r < rows; r++) {
            float* own = scores + r * kFewKeys;
            const auto scaled = [&](const float* scale) {  // beyond the last key, too, where weigh() writes what counts
                for (int64_t j = 0; j < places.count; j += W) store(own + j, mul(load(own + j), load(scale + j)));
            };
            if constexpr (kScaled) scaled(places.k_scale);
            weigh(w, own, r, key, places.count, seen);
            if constexpr (kScaled) scaled(places.v_scale);
        }
        for_row_blocks(rows, [&](auto mr, int64_t m) {
            small_m_values<mr>(w.out + m * w.width, w.width, scores + m * kFewKeys, places, pages.dim);
        });
    }
}

}  // namespace mill
