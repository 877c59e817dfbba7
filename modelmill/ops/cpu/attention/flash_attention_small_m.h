// Decode attention: the query heads of one KV head over a range of keys in a paged KV cache.
//
// Computes: softmax(q · Kᵀ) · V, online softmax
// Dtypes: cache float32, bfloat16, float16 or int8 with scales; float32 arithmetic
// Layout: keys and values are read in place
// Range: up to 8 query rows
// Technique: FMA (AVX-512, AVX2 or portable): four keys at a time against all rows
// Used by: paged_attention.cpp
//
// Keys and values are read in place: four keys at a time against all rows, then values are weighted
// and accumulated in registers. Transposing a tile, as flash_attention.h does, would take longer
// than the product of a few rows.
#pragma once
#include "attention/flash_attention.h"

namespace mill {

// up to so many rows this is faster than flash_attention()
constexpr int64_t kSmallMRows = 8;
constexpr int64_t kKeysPerPass = 256;  // keys per pass
constexpr int64_t kPrefetchKeys = 16;  // prefetch distance in keys

// Addresses of the keys and values, and their scales if int8.
template <class C> struct KeyPointers {
    const C *k[kKeysPerPass], *v[kKeysPerPass];
    float k_scale[kKeysPerPass], v_scale[kKeysPerPass];
    int64_t count = 0;

    // Resolves keys [first, first + keys) of a KV head; entries up to a whole vector repeat the
    // last key.
    void locate(const Pages<C>& pages, const int32_t* table, int64_t kv_head, int64_t first,
                int64_t keys) {
        count = keys;
        int64_t page = first / pages.page_size, inside = first % pages.page_size;
        int64_t index = pages.index(table, kv_head, first);
        for (int64_t j = 0; j < (keys + W - 1) / W * W; j++) {
            k[j] = pages.k + index * pages.dim;
            v[j] = pages.v + index * pages.dim;
            if constexpr (std::is_same_v<C, int8_t>) {
                k_scale[j] = pages.k_scale[index];
                v_scale[j] = pages.v_scale[index];
            }
            if (j + 1 >= keys) continue;
            index++;
            if (++inside == pages.page_size) {
                inside = 0;
                index = (table[++page] * pages.kv_heads + kv_head) * pages.page_size;
            }
        }
    }
};

// Prefetches the cache lines of a key or value.
template <class C> inline void prefetch_line(const C* row, int64_t dim) {
    for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(C)); byte += 64)
        prefetch(reinterpret_cast<const char*>(row) + byte);
}

// Rows of whole vectors (kWhole) have their own loops: with a branch inside, compilers spill the
// sums.

// scores[MR][kFewKeys] of four keys from j.
template <int MR, bool kWhole, class C>
__attribute__((always_inline)) inline void four_scores(float* scores, const float* q, int64_t width,
                                                       const KeyPointers<C>& keys_at, int64_t j,
                                                       int64_t dim) {
    vf acc[MR][4];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < 4; n++) acc[m][n] = zero();
    for (int64_t i = 0; i < dim; i += W) {
        vf keys[4];
        for (int n = 0; n < 4; n++) {
            if constexpr (kWhole)
                keys[n] = load(keys_at.k[j + n] + i);
            else
                keys[n] = take(keys_at.k[j + n] + i, static_cast<int>(dim - i < W ? dim - i : W));
        }
        for (int m = 0; m < MR; m++) {
            const vf x = load(q + m * width + i);
            for (int n = 0; n < 4; n++) acc[m][n] = fma(keys[n], x, acc[m][n]);
        }
    }
    for (int m = 0; m < MR; m++) sums_of(scores + m * kKeysPerPass + j, acc[m], 4);
}

template <int MR, class C>
__attribute__((noinline)) void small_m_scores(float* scores, const float* q, int64_t width,
                                              const KeyPointers<C>& keys_at, int64_t dim) {
    for (int64_t j = 0; j < keys_at.count; j += 4) {
        for (int64_t n = j; n < j + 4; n++) {
            if (n + kPrefetchKeys < keys_at.count) prefetch_line(keys_at.k[n + kPrefetchKeys], dim);
            if (keys_at.v[n] != keys_at.k[n]) prefetch_line(keys_at.v[n], dim);
        }
        if (dim % W == 0)
            four_scores<MR, true>(scores, q, width, keys_at, j, dim);
        else
            four_scores<MR, false>(scores, q, width, keys_at, j, dim);
    }
}

// out[MR][width] += weights[MR][kFewKeys] · values: NV vectors from column i, or the `c` columns
// that are left.
template <int MR, int NV, bool kWhole, class C>
__attribute__((always_inline)) inline void
add_values(float* out, int64_t width, const float* weights, const KeyPointers<C>& keys_at,
           int64_t i, int c) {
    vf acc[MR][NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) acc[m][n] = load(out + m * width + i + n * W);
    for (int64_t j = 0; j < keys_at.count; j++) {
        vf values[NV];
        for (int n = 0; n < NV; n++) {
            if constexpr (kWhole)
                values[n] = load(keys_at.v[j] + i + n * W);
            else
                values[n] = load_n(keys_at.v[j] + i, c);
        }
        for (int m = 0; m < MR; m++) {
            const vf x = set1(weights[m * kKeysPerPass + j]);
            for (int n = 0; n < NV; n++) acc[m][n] = fma(x, values[n], acc[m][n]);
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) store(out + m * width + i + n * W, acc[m][n]);
}

template <int MR, class C>
__attribute__((noinline)) void small_m_values(float* out, int64_t width, const float* weights,
                                              const KeyPointers<C>& keys_at, int64_t dim) {
    constexpr int kWide = W == 16 ? 4 : 2;
    int64_t i = 0;
    for (; i + kWide * W <= dim; i += kWide * W)
        add_values<MR, kWide, true>(out, width, weights, keys_at, i, W);
    for (; i + W <= dim; i += W) add_values<MR, 1, true>(out, width, weights, keys_at, i, W);
    if (i < dim)
        add_values<MR, 1, false>(out, width, weights, keys_at, i, static_cast<int>(dim - i));
}

// f(std::integral_constant<int, MR>, m) for all rows, at most four at a time.
template <class F> inline void for_row_blocks(int64_t rows, const F& f) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) f(std::integral_constant<int, 4>(), m);
    if (rows - m == 3)
        f(std::integral_constant<int, 3>(), m);
    else if (rows - m == 2)
        f(std::integral_constant<int, 2>(), m);
    else if (rows - m == 1)
        f(std::integral_constant<int, 1>(), m);
}

// As flash_attention().
template <class C>
void flash_attention_small_m(const Workspace& w, int64_t rows, const Pages<C>& pages,
                             const int32_t* table, int64_t kv_head, const KeyWindow& window) {
    constexpr bool kScaled = std::is_same_v<C, int8_t>;
    alignas(64) float scores[kSmallMRows * kKeysPerPass];
    KeyPointers<C> keys_at;
    init_rows(w, rows);
    for (int64_t key = window.first; key < window.last; key += kKeysPerPass) {
        keys_at.locate(pages, table, kv_head, key,
                       window.last - key < kKeysPerPass ? window.last - key : kKeysPerPass);
        for_row_blocks(rows, [&](auto mr, int64_t m) {
            small_m_scores<mr>(scores + m * kKeysPerPass, w.q + m * w.width, w.width, keys_at,
                               pages.dim);
        });
        for (int64_t r = 0; r < rows; r++) {
            float* row_scores = scores + r * kKeysPerPass;
            // also past the last key, where update_row() masks
            const auto scaled = [&](const float* scale) {
                for (int64_t j = 0; j < keys_at.count; j += W)
                    store(row_scores + j, mul(load(row_scores + j), load(scale + j)));
            };
            if constexpr (kScaled) scaled(keys_at.k_scale);
            update_row(w, row_scores, r, key, keys_at.count, window);
            if constexpr (kScaled) scaled(keys_at.v_scale);
        }
        for_row_blocks(rows, [&](auto mr, int64_t m) {
            small_m_values<mr>(w.out + m * w.value_stride, w.value_stride,
                               scores + m * kKeysPerPass, keys_at, pages.value_dim);
        });
    }
}

}  // namespace mill
