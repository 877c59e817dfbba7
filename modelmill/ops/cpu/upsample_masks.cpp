// Mask logits to a picture's size, twice by bilinear interpolation, and what lies above 0 of it.
//
// Rows are made when they are needed and at most two are kept at each of the three sizes. Where all logits that reach a
// pixel lie below every cut, nothing is computed: a mask is mostly a small part of its picture.
#include <algorithm>

#include "simd.h"
#include "parallel_for.h"

namespace mill {
namespace {

// Of each place along a line: the two it is made of, and the share of each. As torch computes them (align_corners off).
struct Line {
    int32_t *at, *next;
    float *near, *far;
};

int64_t line_words(int64_t count) { return 4 * ((count + 15) / 16 * 16); }

Line make_line(float* memory, int64_t from, int64_t to, int64_t count) {
    const int64_t room = (count + 15) / 16 * 16;
    Line line{reinterpret_cast<int32_t*>(memory), reinterpret_cast<int32_t*>(memory + room), memory + 2 * room,
              memory + 3 * room};
    const float scale = static_cast<float>(from) / static_cast<float>(to);
    for (int64_t i = 0; i < count; i++) {
        float place = std::fmaf(scale, static_cast<float>(i) + 0.5f, -0.5f);
        if (place < 0.0f) place = 0.0f;
        const int32_t at = std::min(static_cast<int32_t>(place), static_cast<int32_t>(from - 1));
        line.at[i] = at;
        line.next[i] = std::min(at + 1, static_cast<int32_t>(from - 1));
        line.far[i] = std::min(std::max(place - static_cast<float>(at), 0.0f), 1.0f);
        line.near[i] = 1.0f - line.far[i];
    }
    return line;
}

// Places first … last - 1 of a line that touch what lies in [low, high] of the line before.
void reached(const Line& line, int64_t count, int64_t low, int64_t high, int64_t& first, int64_t& last) {
    first = 0;
    while (first < count && line.next[first] < low) first++;
    last = count;
    while (last > first && line.at[last - 1] > high) last--;
}

void across(float* out, const float* row, const Line& line, int64_t first, int64_t last) {
    for (int64_t x = first; x < last; x++)
        out[x] = __builtin_fmaf(row[line.at[x]], line.near[x], row[line.next[x]] * line.far[x]);
}

void between(float* out, const float* a, const float* b, float near, float far, int64_t first, int64_t last) {
    for (int64_t x = first; x < last; x++) out[x] = __builtin_fmaf(a[x], near, b[x] * far);
}

// Two rows that were made last, by number.
struct Pair {
    float* rows[2];
    int64_t held[2] = {-1, -1};
    template <class F> const float* get(int64_t number, int64_t keep, const F& make) {
        if (held[0] == number) return rows[0];
        if (held[1] == number) return rows[1];
        const int slot = held[0] == keep ? 1 : 0;
        make(rows[slot], number);
        held[slot] = number;
        return rows[slot];
    }
};

struct Work {
    int64_t side, wide, tall, width, height, band;
    float cut;  // nothing at or below it can reach a mask
    float offset;
    Line right, down, right2, down2;
};

struct Extent { int64_t x0, y0, x1, y1, area, high, low; };

void cut_row(uint8_t* mask, const float* row, int64_t y, int64_t first, int64_t last, float offset, Extent& found) {
    int32_t area = 0, high = 0, low = 0;
    if (mask) for (int64_t x = first; x < last; x++) mask[x] = row[x] > 0.0f;
    for (int64_t x = first; x < last; x++) {
        area += row[x] > 0.0f;
        high += row[x] > offset;
        low += row[x] > -offset;
    }
    found.high += high;
    found.low += low;
    if (!area) return;
    found.area += area;
    int64_t a = first, b = last - 1;
    while (!(row[a] > 0.0f)) a++;
    while (!(row[b] > 0.0f)) b--;
    found.x0 = std::min(found.x0, a);
    found.x1 = std::max(found.x1, b);
    found.y0 = std::min(found.y0, y);
    found.y1 = std::max(found.y1, y);
}

// The part of the logits that lies above the cut; bottom -1: none.
struct Part { int64_t top, bottom, left, right; };

Part part_of(const float* logits, int64_t n, float cut, int32_t* columns) {
    Part part{n, -1, n, -1};
    std::memset(columns, 0, n * sizeof *columns);
    for (int64_t y = 0; y < n; y++) {
        const float* row = logits + y * n;
        int32_t any = 0;
        for (int64_t x = 0; x < n; x++) any |= row[x] > cut;
        if (!any) continue;
        part.top = std::min(part.top, y), part.bottom = y;
        for (int64_t x = 0; x < n; x++) columns[x] |= row[x] > cut;
    }
    for (int64_t x = 0; x < n; x++)
        if (columns[x]) part.left = std::min(part.left, x), part.right = x;
    return part;
}

// Rows y0 … y1 - 1 of one mask.
void band_of(uint8_t* mask, Extent& found, const float* logits, const Part& part, const Work& w, int64_t y0,
             int64_t y1) {
    const int64_t n = w.side, top = part.top, bottom = part.bottom, left = part.left, right = part.right;
    found = {w.width, w.height, -1, -1, 0, 0, 0};
    if (mask) std::memset(mask + y0 * w.width, 0, (y1 - y0) * w.width);
    if (bottom < 0) return;
    int64_t x_first, x_last, x2_first, x2_last, y_first, y_last, y2_first, y2_last;
    reached(w.right, w.wide, left, right, x_first, x_last);
    reached(w.right2, w.width, x_first, x_last - 1, x2_first, x2_last);
    reached(w.down, w.tall, top, bottom, y_first, y_last);
    reached(w.down2, w.height, y_first, y_last - 1, y2_first, y2_last);
    y0 = std::max(y0, y2_first), y1 = std::min(y1, y2_last);
    if (y0 >= y1 || x2_first >= x2_last) return;
    // what the next line reads on either side has to be there
    x_first = w.right2.at[x2_first], x_last = w.right2.next[x2_last - 1] + 1;
    thread_local Scratch memory;
    const int64_t a = (w.wide + 15) / 16 * 16, b = (w.width + 15) / 16 * 16;
    float* rows = memory.get<float>(3 * a + 3 * b);
    Pair small{{rows, rows + a}}, large{{rows + 3 * a, rows + 3 * a + b}};
    float *middle = rows + 2 * a, *last = rows + 3 * a + 2 * b;
    const auto make_small = [&](float* out, int64_t y) { across(out, logits + y * n, w.right, x_first, x_last); };
    const auto make_large = [&](float* out, int64_t y) {
        const int64_t p = w.down.at[y], q = w.down.next[y];
        const float* upper = small.get(p, q, make_small);
        const float* lower = small.get(q, p, make_small);
        between(middle, upper, lower, w.down.near[y], w.down.far[y], x_first, x_last);
        across(out, middle, w.right2, x2_first, x2_last);
    };
    for (int64_t y = y0; y < y1; y++) {
        const int64_t p = w.down2.at[y], q = w.down2.next[y];
        const float* upper = large.get(p, q, make_large);
        const float* lower = large.get(q, p, make_large);
        between(last, upper, lower, w.down2.near[y], w.down2.far[y], x2_first, x2_last);
        cut_row(mask ? mask + y * w.width : nullptr, last, y, x2_first, x2_last, w.offset, found);
    }
}

}  // namespace
}  // namespace mill

// masks [count, height, width] or null; found [count, bands, 7]: x0, y0, x1, y1 (a band without a pixel: the picture's
// size, and −1), pixels above 0, above offset, above −offset; logits [count, side, side]. image: pixels a side of the
// square, of which the upper left wide × tall hold the picture. band: rows of the picture at a time.
extern "C" void upsample_masks(uint8_t* masks, int64_t* found, const float* logits, int64_t count, int64_t side,
                        int64_t image, int64_t wide, int64_t tall, int64_t width, int64_t height, int64_t band,
                        double offset) {
    using namespace mill;
    thread_local Scratch memory, parts_memory;
    float* words = memory.get<float>(line_words(wide) + line_words(tall) + line_words(width) + line_words(height));
    Part* parts = parts_memory.get<Part>(count);
    Work w{side, wide, tall, width, height, band, 0.0f, static_cast<float>(offset)};
    // sums of shares may be off by a bit: what lies just below a cut is computed
    w.cut = -std::fabs(w.offset) - 1e-3f * (1.0f + std::fabs(w.offset));
    w.right = make_line(words, side, image, wide), words += line_words(wide);
    w.down = make_line(words, side, image, tall), words += line_words(tall);
    w.right2 = make_line(words, wide, width, width), words += line_words(width);
    w.down2 = make_line(words, tall, height, height);
    share(count, 1, count * side * side, [&](int64_t from, int64_t to) {
        thread_local Scratch columns;
        for (int64_t i = from; i < to; i++)
            parts[i] = part_of(logits + i * side * side, side, w.cut, columns.get<int32_t>(side));
    });
    const int64_t bands = (height + band - 1) / band;
    share(count * bands, 1, count * width * height, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t which = i / bands, y0 = i % bands * band;
            Extent extent;
            band_of(masks ? masks + which * width * height : nullptr, extent, logits + which * side * side, parts[which],
                    w, y0, std::min(y0 + band, height));
            const int64_t told[7] = {extent.x0, extent.y0, extent.x1, extent.y1, extent.area, extent.high, extent.low};
            std::memcpy(found + i * 7, told, sizeof told);
        }
    });
}
