// Upsamples mask logits to the picture's size.
//
// Computes: masks, boxes, areas and stability counts from logits[count, side, side] by two bilinear
//     interpolations
// Dtypes: logits float32; masks of bytes
// Layout: row-major
// Range: any M
// Technique: rows on demand, regions below the threshold skipped, SIMD (simd.h), thread pool
// Ops: upsample_masks
//
// Rows are computed on demand and at most two are kept per size. Regions whose contributing logits
// are all below the threshold are skipped: a mask usually covers a small part of its picture.
#include <algorithm>

#include "common/simd.h"
#include "common/parallel_for.h"

namespace mill {
namespace {

// Bilinear interpolation along one axis: the two source indices and weights of each output
// position, as torch computes them (align_corners=False).
struct Axis {
    int32_t *at, *next;
    float *near, *far;
};

int64_t axis_words(int64_t count) { return 4 * ((count + 15) / 16 * 16); }

Axis make_axis(float* memory, int64_t from, int64_t to, int64_t count) {
    const int64_t room = (count + 15) / 16 * 16;
    Axis axis{reinterpret_cast<int32_t*>(memory), reinterpret_cast<int32_t*>(memory + room),
              memory + 2 * room, memory + 3 * room};
    const float scale = static_cast<float>(from) / static_cast<float>(to);
    for (int64_t i = 0; i < count; i++) {
        float place = std::fmaf(scale, static_cast<float>(i) + 0.5f, -0.5f);
        if (place < 0.0f) place = 0.0f;
        const int32_t at = std::min(static_cast<int32_t>(place), static_cast<int32_t>(from - 1));
        axis.at[i] = at;
        axis.next[i] = std::min(at + 1, static_cast<int32_t>(from - 1));
        axis.far[i] = std::min(std::max(place - static_cast<float>(at), 0.0f), 1.0f);
        axis.near[i] = 1.0f - axis.far[i];
    }
    return axis;
}

// Output range [first, last) that reads source positions in [low, high].
void touched_range(const Axis& axis, int64_t count, int64_t low, int64_t high, int64_t& first,
                   int64_t& last) {
    first = 0;
    while (first < count && axis.next[first] < low) first++;
    last = count;
    while (last > first && axis.at[last - 1] > high) last--;
}

void resample_row(float* out, const float* row, const Axis& axis, int64_t first, int64_t last) {
    for (int64_t x = first; x < last; x++)
        out[x] = __builtin_fmaf(row[axis.at[x]], axis.near[x], row[axis.next[x]] * axis.far[x]);
}

void blend_rows(float* out, const float* a, const float* b, float near, float far, int64_t first,
                int64_t last) {
    for (int64_t x = first; x < last; x++) out[x] = __builtin_fmaf(a[x], near, b[x] * far);
}

// Cache of the two most recent rows, by row number.
struct Pair {
    float* rows[2];
    int64_t row_numbers[2] = {-1, -1};
    template <class F> const float* get(int64_t number, int64_t keep, const F& make) {
        if (row_numbers[0] == number) return rows[0];
        if (row_numbers[1] == number) return rows[1];
        const int slot = row_numbers[0] == keep ? 1 : 0;
        make(rows[slot], number);
        row_numbers[slot] = number;
        return rows[slot];
    }
};

struct Work {
    int64_t side, wide, tall, width, height, band;
    float cut;  // logits at or below it cannot contribute to a mask
    float offset;
    Axis right{}, down{}, right2{}, down2{};
};

struct Extent {
    int64_t x0, y0, x1, y1, area, high, low;
};

void threshold_row(uint8_t* mask, const float* row, int64_t y, int64_t first, int64_t last,
                   float offset, Extent& stats) {
    int32_t area = 0, high = 0, low = 0;
    if (mask)
        for (int64_t x = first; x < last; x++) mask[x] = row[x] > 0.0f;
    for (int64_t x = first; x < last; x++) {
        area += row[x] > 0.0f;
        high += row[x] > offset;
        low += row[x] > -offset;
    }
    stats.high += high;
    stats.low += low;
    if (!area) return;
    stats.area += area;
    int64_t a = first, b = last - 1;
    while (!(row[a] > 0.0f)) a++;
    while (!(row[b] > 0.0f)) b--;
    stats.x0 = std::min(stats.x0, a);
    stats.x1 = std::max(stats.x1, b);
    stats.y0 = std::min(stats.y0, y);
    stats.y1 = std::max(stats.y1, y);
}

// Bounding box of the logits above the cut; bottom −1: none.
struct Region {
    int64_t top, bottom, left, right;
};

Region active_region(const float* logits, int64_t n, float cut, int32_t* columns) {
    Region region{n, -1, n, -1};
    std::memset(columns, 0, n * sizeof *columns);
    for (int64_t y = 0; y < n; y++) {
        const float* row = logits + y * n;
        int32_t any = 0;
        for (int64_t x = 0; x < n; x++) any |= row[x] > cut;
        if (!any) continue;
        region.top = std::min(region.top, y), region.bottom = y;
        for (int64_t x = 0; x < n; x++) columns[x] |= row[x] > cut;
    }
    for (int64_t x = 0; x < n; x++)
        if (columns[x]) region.left = std::min(region.left, x), region.right = x;
    return region;
}

// Rows y0 … y1 - 1 of one mask.
void upsample_band(uint8_t* mask, Extent& stats, const float* logits, const Region& region,
                   const Work& w, int64_t y0, int64_t y1) {
    const int64_t n = w.side, top = region.top, bottom = region.bottom, left = region.left,
                  right = region.right;
    stats = {w.width, w.height, -1, -1, 0, 0, 0};
    if (mask) std::memset(mask + y0 * w.width, 0, (y1 - y0) * w.width);
    if (bottom < 0) return;
    int64_t x_first, x_last, x2_first, x2_last, y_first, y_last, y2_first, y2_last;
    touched_range(w.right, w.wide, left, right, x_first, x_last);
    touched_range(w.right2, w.width, x_first, x_last - 1, x2_first, x2_last);
    touched_range(w.down, w.tall, top, bottom, y_first, y_last);
    touched_range(w.down2, w.height, y_first, y_last - 1, y2_first, y2_last);
    y0 = std::max(y0, y2_first), y1 = std::min(y1, y2_last);
    if (y0 >= y1 || x2_first >= x2_last) return;
    // include the source columns that the second interpolation reads
    x_first = w.right2.at[x2_first], x_last = w.right2.next[x2_last - 1] + 1;
    thread_local Scratch memory;
    const int64_t a = (w.wide + 15) / 16 * 16, b = (w.width + 15) / 16 * 16;
    float* rows = memory.get<float>(3 * a + 3 * b);
    Pair small{{rows, rows + a}}, large{{rows + 3 * a, rows + 3 * a + b}};
    float *middle = rows + 2 * a, *last = rows + 3 * a + 2 * b;
    const auto make_small = [&](float* out, int64_t y) {
        resample_row(out, logits + y * n, w.right, x_first, x_last);
    };
    const auto make_large = [&](float* out, int64_t y) {
        const int64_t p = w.down.at[y], q = w.down.next[y];
        const float* upper = small.get(p, q, make_small);
        const float* lower = small.get(q, p, make_small);
        blend_rows(middle, upper, lower, w.down.near[y], w.down.far[y], x_first, x_last);
        resample_row(out, middle, w.right2, x2_first, x2_last);
    };
    for (int64_t y = y0; y < y1; y++) {
        const int64_t p = w.down2.at[y], q = w.down2.next[y];
        const float* upper = large.get(p, q, make_large);
        const float* lower = large.get(q, p, make_large);
        blend_rows(last, upper, lower, w.down2.near[y], w.down2.far[y], x2_first, x2_last);
        threshold_row(mask ? mask + y * w.width : nullptr, last, y, x2_first, x2_last, w.offset,
                      stats);
    }
}

}  // namespace
}  // namespace mill

// masks [count, height, width] or null; found [count, bands, 7]: x0, y0, x1, y1 (a band without a
// pixel: the picture's size, and −1), pixels above 0, above offset, above −offset; logits [count,
// side, side]. image: pixels a side of the square, of which the upper left wide × tall hold the
// picture. band: rows of the picture at a time.
extern "C" void upsample_masks(uint8_t* masks, int64_t* stats, const float* logits, int64_t count,
                               int64_t side, int64_t image, int64_t wide, int64_t tall,
                               int64_t width, int64_t height, int64_t band, double offset) {
    using namespace mill;
    thread_local Scratch memory, regions_memory;
    float* words = memory.get<float>(axis_words(wide) + axis_words(tall) + axis_words(width) +
                                     axis_words(height));
    Region* regions = regions_memory.get<Region>(count);
    Work w{side, wide, tall, width, height, band, 0.0f, static_cast<float>(offset)};
    // margin for rounding: values just below the threshold are computed too
    w.cut = -std::fabs(w.offset) - 1e-3f * (1.0f + std::fabs(w.offset));
    w.right = make_axis(words, side, image, wide), words += axis_words(wide);
    w.down = make_axis(words, side, image, tall), words += axis_words(tall);
    w.right2 = make_axis(words, wide, width, width), words += axis_words(width);
    w.down2 = make_axis(words, tall, height, height);
    parallel_for(count, 1, count * side * side, [&](int64_t from, int64_t to) {
        thread_local Scratch columns;
        for (int64_t i = from; i < to; i++)
            regions[i] =
                active_region(logits + i * side * side, side, w.cut, columns.get<int32_t>(side));
    });
    const int64_t bands = (height + band - 1) / band;
    parallel_for(count * bands, 1, count * width * height, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t mask_index = i / bands, y0 = i % bands * band;
            Extent extent;
            upsample_band(masks ? masks + mask_index * width * height : nullptr, extent,
                          logits + mask_index * side * side, regions[mask_index], w, y0,
                          std::min(y0 + band, height));
            const int64_t values[7] = {extent.x0,   extent.y0,   extent.x1, extent.y1,
                                       extent.area, extent.high, extent.low};
            std::memcpy(stats + i * 7, values, sizeof values);
        }
    });
}
