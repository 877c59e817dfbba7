// How small-M kernels stream weights from memory: prefetched, or from rows far apart.
//
// Computes: addresses ahead of the loads of a row; index ranges of weight rows
// Range: rows of any length, any number of rows
// Technique: prefetch to L1, or with MILL_PREFETCH_L2 to L2
// Used by: block_floating_point.h, gemm_small_m.h, w8a8_linear.cpp
//
// The hardware prefetchers stop at page ends, rows are short, and a block reads several rows at
// once, so every cache line is prefetched explicitly. MILL_PREFETCH_L2
// (build.native_compiler_flags) selects the target: Zen 4 has few L1 fill buffers, so that more
// lines are in flight if they are prefetched to L2 only. With several rows of activations per line
// the kernel is not bound by memory, and L1 is better.
//
// Short rows that follow each other lie in one or two pages; rows a few KiB apart are as many
// streams as rows. Measured on two Zen 3 cores with rows of 576 bytes, one core, from memory: 11 to
// 13 GB/s for eight neighbouring rows, with or without software prefetch; 19 to 21 GB/s for eight
// rows 8 KiB apart (a plain sum over the same bytes in order: 15).
#pragma once
#include <cstdint>
#include <type_traits>

namespace mill {

#if defined(MILL_PREFETCH_L2)
template <int ROWS> constexpr bool kToL2 = ROWS == 1;
#else
template <int ROWS> constexpr bool kToL2 = false;
#endif

// Whether the experts' kernels multiply weight rows one after the other, as they lie in memory;
// else eight at a time, which share the loads of the activations. MILL_ROW_BY_ROW is set on Zen 5,
// whose prefetchers follow one stream better than eight: of 45 GB/s that a core reads there, int8
// experts get 31.5 instead of 27, while the same loop over weights in a cache is 15 % slower.
#if defined(MILL_ROW_BY_ROW)
constexpr bool kRowByRow = true;
#else
constexpr bool kRowByRow = false;
#endif
constexpr int64_t kRowByRowDistance = 24 << 10;

// Prefetch distance in bytes for a block of `block` bytes of weights. For L1: the same position in
// the next block if it is not too far, since all rows of a block are read at once.
template <int ROWS> inline int64_t prefetch_distance(int64_t block) {
    if (kToL2<ROWS>) return 16 << 10;
    return block > 8192 && block <= (32 << 10) ? block : 8192;
}

// Prefetches a line that ROWS rows of activations will use.
template <int ROWS> inline void prefetch_line(const void* p) {
    __builtin_prefetch(p, 0, kToL2<ROWS> ? 2 : 3);
}

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
