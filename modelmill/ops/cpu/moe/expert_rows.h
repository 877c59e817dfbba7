// Rows of activations as the products with experts read them, and these products on one thread.
//
// Computes: sums[N] = x[K] · dequant(weight[N, K])ᵀ for one row of x and some rows of an expert
// Dtypes: x float32, bfloat16 or float16; int8, int4 or e2m1 codes; float32 sums
// Layout: codes in rows, 32 columns a run; scales and offsets [N, groups]
// Range: K a multiple of 32
// Technique: of 16 bits: bytes (digit_planes.h) with VNNI, 16-bit integers
//     (block_floating_point.h) on AVX2; else float FMA (groupwise.h)
// Used by: experts.h
//
// What pack makes lies in its scratch memory. The classes differ between instruction sets, so that
// none may be thread_local: a process merges such variables of all libraries that have one of the
// name.
#pragma once
#include "moe/digit_planes.h"
#include "weight_only_gemm/groupwise.h"

namespace mill {

// Whether the products have a part of offset times sum of x.
template <class Code> inline bool has_offsets(const Grouped<Code>& w) {
    return w.offset || Code::kZeroPoint != 0.0f;
}

// Rows of a weight that are multiplied next, for prefetches; null: unknown.
struct NextRows {
    const uint8_t* codes = nullptr;
    const uint8_t* scale = nullptr;
    const uint8_t* offset = nullptr;
    int64_t grid_bytes = 0;  // of the scales, and of the offsets
};

// Rows from .. to.
template <class Code> NextRows next_rows(const Grouped<Code>& w, int64_t from, int64_t to) {
    const int64_t size = w.scale_type == kE8M0Scale   ? 1
                         : w.scale_type == kHalfScale ? 2
                                                      : 4,
                  row = w.groups * size;
    const auto* scale = static_cast<const uint8_t*>(w.scale);
    const auto* offset = static_cast<const uint8_t*>(w.offset);
    return {w.codes + from * w.bytes, scale + from * row, offset ? offset + from * row : nullptr,
            (to - from) * row};
}

// With float products.
template <class Code, class T> class WideRows {
  public:
    void pack(Scratch& scratch, const T* x, int64_t rows, int64_t k, const Grouped<Code>& w) {
        rows_ = widen_rows(scratch, x, w, rows, k);
    }
    void multiply(float* sums, int64_t m, const Grouped<Code>& w, int64_t from, int64_t to,
                  const NextRows&) const {
        const auto put_sums = [=](int64_t, int64_t j, const float* values, int count) {
            std::memcpy(sums + j - from, values, static_cast<size_t>(count) * sizeof(float));
        };
        int64_t j = from;
        for (; j + 4 <= to; j += 4)
            group_rows<Code, 4>(rows_.input, rows_.group_sums, rows_.stride, w, m, m + 1, j,
                                put_sums);
        for (; j < to; j++)
            group_rows<Code, 1>(rows_.input, rows_.group_sums, rows_.stride, w, m, m + 1, j,
                                put_sums);
    }

  private:
    FloatRows rows_{};
};

#if defined(MILL_DIGIT_PLANES)
template <class Code, class T> class IntegerRows {
  public:
    void pack(Scratch& scratch, const T* x, int64_t rows, int64_t k, const Grouped<Code>& w) {
        const int64_t count = (k + kBlockColumns - 1) / kBlockColumns, groups = w.groups,
                      group = w.runs * kPackColumns;
        const int64_t floats = rows * (count + groups) * static_cast<int64_t>(sizeof(float));
        auto* blocks = scratch.get<DigitBlock>(
            rows * count + floats / static_cast<int64_t>(sizeof(DigitBlock)) + 1);
        auto* powers = reinterpret_cast<float*>(blocks + rows * count);
        float* group_sums = powers + rows * count;
        for (int64_t m = 0; m < rows; m++) {
            const T* row = x + m * k;
            for (int64_t b = 0; b < count; b++)
                powers[m * count + b] = pack_digits<Code>(
                    blocks[m * count + b], row + b * kBlockColumns, k - b * kBlockColumns);
            for (int64_t g = 0; g < groups && has_offsets(w); g++) {
                const int64_t rest = k - g * group;
                vf total = zero();
                for_each_vector(rest < group ? rest : group, [&](int64_t i, int c) {
                    total = add(total, take(row + g * group + i, c));
                });
                group_sums[m * groups + g] =
                    (groups == 1 || w.offset ? 1.0f : -Code::kZeroPoint) * sum(total);
            }
        }
        rows_ = {blocks, powers, group_sums, count};
    }
    void multiply(float* sums, int64_t m, const Grouped<Code>& w, int64_t from, int64_t to,
                  const NextRows& next) const {
        thread_local Scratch scratch, scale_scratch;
        for (int64_t at = 0; at < next.grid_bytes; at += 64) {
            prefetch_line<1>(next.scale + at);
            if (next.offset) prefetch_line<1>(next.offset + at);
        }
        const int64_t rows = to - from;
        const DigitRow row{rows_.blocks + m * rows_.count, rows_.powers + m * rows_.count,
                           rows_.group_sums + m * w.groups, rows_.count};
        DigitWeights weights{
            w.codes + from * w.bytes, w.bytes, rows, next.codes, nullptr, 1, nullptr};
        if (w.groups == 1) {
            weights.scales = w.grids(from, rows, scratch);
            if (has_offsets(w)) weights.starts = weights.scales + rows;
            return multiply_by<DigitScales::kRow>(sums, row, weights, rows);
        }
        const bool of_blocks = w.runs % kBlockRuns == 0;
        weights.pitch = rows_.count * (of_blocks ? 1 : kBlockRuns);
        float* starts = scratch.get<float>(rows * W);
        float* scales = scale_scratch.get<float>(rows * weights.pitch);
        for (int64_t n = 0; n < rows; n++)
            store(starts + n * W, scale_row(scales + n * weights.pitch, row, w, from + n));
        weights.scales = scales;
        if (has_offsets(w)) weights.starts = starts;
        if (of_blocks)
            multiply_by<DigitScales::kBlock>(sums, row, weights, rows);
        else
            multiply_by<DigitScales::kRun>(sums, row, weights, rows);
    }

  private:
    template <DigitScales SCALES>
    static void multiply_by(float* sums, const DigitRow& x, const DigitWeights& w, int64_t rows) {
        int64_t n = 0;
        for (; n + 8 <= rows; n += 8) digit_dots<Code, 8, SCALES>(sums + n, x, w, n);
        for (; n < rows; n++) digit_dots<Code, 1, SCALES>(sums + n, x, w, n);
    }
    // Writes a row's scales times powers of two, for each of its blocks or, if groups are no whole
    // blocks, of its runs (0 behind the last one). Returns the sum of offsets times sums of x,
    // spread over the lanes.
    static vf scale_row(float* out, const DigitRow& x, const Grouped<Code>& w, int64_t row) {
        const vi block_of_lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        const int64_t parts = w.runs % kBlockRuns ? kBlockRuns : 1,  // of a block
            width = w.runs * parts / kBlockRuns,                     // parts of a group
            end = x.count * parts;
        vf start = zero();
        for_each_vector(w.groups, [&](int64_t g, int c) {
            const int64_t at = row * w.groups + g;
            const vf scale = w.values(w.scale, at, c);
            if (has_offsets(w))
                start = fma(w.offset ? w.values(w.offset, at, c) : scale, take(x.group_sums + g, c),
                            start);
            if (w.runs == kBlockRuns)  // a group is a block
                return put(out + g, mul(scale, take(x.powers + g, c)), c);
            if (w.runs == 1) {  // a group is a run
                const int blocks = (c + 3) / static_cast<int>(kBlockRuns);
                const vf powers = load_n(x.powers + g / kBlockRuns, blocks);
                return put(out + g, mul(scale, _mm512_permutexvar_ps(block_of_lane, powers)), c);
            }
            float lanes[W];
            store(lanes, scale);
            for (int64_t i = 0; i < c * width && g * width + i < end; i++)
                out[g * width + i] = lanes[i / width] * x.powers[(g * width + i) / parts];
        });
        for (int64_t i = w.groups * width; i < end; i++) out[i] = 0.0f;
        return start;
    }

    DigitRow rows_{};
};
#elif defined(MILL_AVX2)
template <class Code, class T> class IntegerRows {
  public:
    void pack(Scratch& scratch, const T* x, int64_t rows, int64_t k, const Grouped<Code>& w) {
        rows_ = pack_rows(scratch, x, rows, k, has_offsets(w) ? w.runs : 0, Code::kUnit);
    }
    void multiply(float* sums, int64_t m, const Grouped<Code>& w, int64_t from, int64_t to,
                  const NextRows&) const {
        thread_local Scratch scratch;
        const int64_t rows = to - from;
        const float* grids = w.grids(from, rows, scratch);
        const WeightGrids of_rows{grids, has_offsets(w) ? grids + rows * w.groups : nullptr,
                                  w.groups, w.runs, w.groups};
        const auto multiply_by = [&](auto runs_of_a_scale) {
            fixed_point_columns<decltype(runs_of_a_scale)::value, true, Code>(
                sums, rows_, m, m + 1, w.codes, w.bytes, w.bytes / Code::kBytes, from, to, of_rows);
        };
        if (w.groups == 1 || w.runs % 4 == 0)
            multiply_by(std::integral_constant<int, 4>{});
        else if (w.runs % 2 == 0)
            multiply_by(std::integral_constant<int, 2>{});
        else
            multiply_by(std::integral_constant<int, 1>{});
    }

  private:
    FixedPointRows rows_{};
};
#else
template <class Code, class T> using IntegerRows = WideRows<Code, T>;
#endif

template <class Code, class T>
using ExpertRows = std::conditional_t<sizeof(T) == 2, IntegerRows<Code, T>, WideRows<Code, T>>;

}  // namespace mill
