// How weights that stream from memory are asked for ahead of their use.
//
// The hardware prefetchers stop at the end of a page, rows are short, and a block reads several rows at once: so each line is
// asked for by hand. Where it goes decides (MILL_FAR; build.py tells where): Zen 4 has few places for lines on their way to
// the nearest cache, so that more of them come when the second-level cache is asked. Where several rows of activations use a
// line it is not memory that they wait for, and the nearest cache is better.
#pragma once
#include <cstdint>

namespace mill {

#if defined(MILL_FAR)
template <int ROWS> constexpr bool kFar = ROWS == 1;
#else
template <int ROWS> constexpr bool kFar = false;
#endif

// How many bytes ahead when `block` bytes of weights are taken side by side. Near: the same place in the next block where
// that is not too far, since all rows of a block are read at once.
template <int ROWS> inline int64_t prefetch_distance(int64_t block) {
    if (kFar<ROWS>) return 16 << 10;
    return block > 8192 && block <= (32 << 10) ? block : 8192;
}

// A line that ROWS rows of activations will use.
template <int ROWS> inline void prefetch_line(const void* p) { __builtin_prefetch(p, 0, kFar<ROWS> ? 2 : 3); }

}  // namespace mill
