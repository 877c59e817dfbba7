// Order in which a small-M GEMM reads weight rows, so that memory has many pages in flight.
//
// Computes: index ranges of weight rows
// Range: any number of rows
// Technique: rows far apart are read at once
// Used by: block_floating_point.h, gemm_small_m.h
//
// Hardware prefetchers follow a stream within a page. Short rows that follow each other lie in one
// or two pages; rows a few KiB apart are as many streams as rows. Measured on two Zen 3 cores with
// rows of 576 bytes, one core, from memory: 11 to 13 GB/s for eight neighbouring rows, with or
// without software prefetch; 19 to 21 GB/s for eight rows 8 KiB apart (a plain sum over the same
// bytes in order: 15).
#pragma once
#include <cstdint>
#include <type_traits>

namespace mill {

constexpr int64_t kFarChunkBytes = 64 << 10;

// Weight rows of a chunk: about 64 KiB, or an eighth of a smaller matrix, whole groups of eight.
// blocks: of activation rows, which share the work too.
inline int64_t far_chunk_rows(int64_t n, int64_t row_bytes, int64_t blocks) {
    const int64_t width = row_bytes > 0 ? row_bytes : 1, share = n * width * blocks / 8;
    return ((share < kFarChunkBytes ? share : kFarChunkBytes) / width / 8 + 1) * 8;
}

// Calls f(first, pitch, integral_constant<NB>) for NB rows that lie `pitch` rows apart, until
// `count` rows are done; the last ones one by one.
template <int NB, class F> inline void for_far_rows(int64_t count, F&& f) {
    const int64_t pitch = count / NB;
    for (int64_t i = 0; i < pitch; i++) f(i, pitch, std::integral_constant<int, NB>{});
    for (int64_t i = pitch * NB; i < count; i++) f(i, int64_t{1}, std::integral_constant<int, 1>{});
}

}  // namespace mill
