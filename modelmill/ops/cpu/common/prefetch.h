// Software prefetch of weights that are streamed from memory, for the small-M linear kernels.
//
// Computes: addresses ahead of the loads of a row
// Range: rows of any length
// Technique: prefetch instructions to L1, or with MILL_PREFETCH_L2 to L2
// Used by: gemm_small_m.h, w8a8_linear.cpp
//
// The hardware prefetchers stop at page ends, rows are short, and a block reads several rows at
// once, so every cache line is prefetched explicitly. MILL_PREFETCH_L2 (build.machine_flags)
// selects the target: Zen 4 has few L1 fill buffers, so that more lines are in flight if they are
// prefetched to L2 only. With several rows of activations per line the kernel is not bound by
// memory, and L1 is better.
#pragma once
#include <cstdint>

namespace mill {

#if defined(MILL_PREFETCH_L2)
template <int ROWS> constexpr bool kToL2 = ROWS == 1;
#else
template <int ROWS> constexpr bool kToL2 = false;
#endif

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

}  // namespace mill
