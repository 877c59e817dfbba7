// The sequences of a step and their slots of recurrent state, as ops/recurrent_metadata.py has
// them.
//
// Computes: declarations, and the loop over parts of sequences
// Dtypes: int32 first tokens; int64 positions and slots
// Layout: contiguous
// Range: any number of sequences
// Technique: thread pool
// Used by: causal_conv.cpp, gated_delta_rule.cpp, ssd_scan.cpp
#pragma once
#include <cstring>

#include "common/parallel_for.h"
#include "common/simd.h"

namespace mill {

// One sequence: its first token and their number; the position of the first; how many tokens of
// the step are behind the snapshot (outside of [0, count]: none is kept).
struct StateSequence {
    int64_t start, count, first, slot, snapshot_slot, kept;
};

struct StateRows {
    const int32_t* query_start;
    const int64_t *positions, *slots, *snapshot_slots, *snapshot_ends;
    int64_t sequences;

    StateSequence sequence(int64_t i) const {
        const int64_t start = query_start[i], count = query_start[i + 1] - start;
        const int64_t first = count > 0 ? positions[start] : 0;
        return {start, count, first, slots[i], snapshot_slots[i], snapshot_ends[i] - first};
    }
};

// Calls f(sequence, part) for each part of each sequence with tokens, on several threads.
template <class F>
inline void for_each_part(const StateRows& rows, int64_t parts, int64_t work, const F& f) {
    parallel_for(rows.sequences * parts, 1, work, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const StateSequence sequence = rows.sequence(i / parts);
            if (sequence.count > 0) f(sequence, i % parts);
        }
    });
}

template <class T> inline void to_floats(float* out, const T* x, int64_t n) {
    for_each_vector(n, [&](int64_t i, int c) { put(out + i, take(x + i, c), c); });
}

// log(1 + e^x) in float64.
inline double softplus(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }

// A float32 state [rows, width] of one head, advanced token by token.
struct HeadState {
    float* own;
    float* snapshot;
    int64_t size, kept;

    HeadState(const StateSequence& s, float* state, int64_t slot_stride, int64_t head,
              int64_t elements)
        : own(state + s.slot * slot_stride + head * elements),
          snapshot(state + s.snapshot_slot * slot_stride + head * elements), size(elements),
          kept(s.kept) {
        if (s.first == 0) std::memset(own, 0, static_cast<size_t>(size) * sizeof(float));
        keep_behind(0);
    }
    // Keeps the snapshot if it is the one behind so many tokens of the step.
    void keep_behind(int64_t tokens) const {
        if (tokens == kept) std::memcpy(snapshot, own, static_cast<size_t>(size) * sizeof(float));
    }
};

}  // namespace mill
