"""The threshold that top-k and top-p leave of a row, found without a sort; device functions of
``sample.py``.

F of a value is how many tokens are not below it (top-k), or what they weigh (top-p). It is taken at
evenly spread pivots first, then exactly among the few tokens gathered between two of them, or over
the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelmill.ops.triton.integer_probs import (
    NEG_INF,
    POS_INF,
    bits_to_float,
    ceil_fraction,
    float_to_key,
    key_to_float,
    scaled_logits,
    token_weight,
)

# what lies further below the maximum weighs nothing: 2^-40 is e^-27.7
_LOGIT_SPAN = tl.constexpr(28.0)
# of the whole: several times what the approximate weights may be off
_MAX_RELATIVE_ERROR = tl.constexpr(2.0**-16)

# A row's scratch. sums (int64): F of each level's pivots, four totals (GOT, TOTAL, ABOVE), each
# chunk's weight.
# words (int32, or float32 bits): each chunk's maximum, least value and place of the maximum; the
# threshold and the last id among those equal to it; the gathered values and their ids.
GOT, TOTAL, ABOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def sums_row_ptr(sums_ptr, row, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr):
    return sums_ptr + row * (2 * PIVOTS + 4 + CHUNKS)


@triton.jit
def words_row_ptr(words_ptr, row, CHUNKS: tl.constexpr, GATHERED: tl.constexpr):
    return words_ptr + row * (3 * CHUNKS + 2 + 2 * GATHERED)


@triton.jit
def filter_params(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
    """(k, p, whether tokens are counted, whether a threshold is wanted at all)."""
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    counting = (k > 0) & (k < vocab)
    return k, p, counting, (tl.load(temperature_ptr + row) > 0) & (counting | (p < 1.0))


@triton.jit
def logit_range(words, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """(maximum, least value worth a pivot) of a row."""
    index = tl.arange(0, CHUNKS)
    inside = index * CHUNK < vocab
    most = tl.max(
        tl.where(inside, bits_to_float(tl.load(words + index, mask=inside, other=0)), NEG_INF)
    )
    least = tl.min(
        tl.where(
            inside, bits_to_float(tl.load(words + CHUNKS + index, mask=inside, other=0)), POS_INF
        )
    )
    return most, tl.maximum(least, most - _LOGIT_SPAN)


@triton.jit
def narrow_bracket(level, mass, lo, hi, row_max, sufficient, insufficient, PIVOTS: tl.constexpr):
    """The pivots around the threshold: (lo, hi, F(lo), F(hi)), hi = inf where every pivot has
    enough above it.

    F(lo) is above any number where no pivot has surely enough.
    """
    step = pivot_step(lo, hi, row_max, PIVOTS)
    # F falls from pivot to pivot
    below = tl.sum((mass.to(tl.float64) >= sufficient).to(tl.int32))
    above = PIVOTS - tl.sum((mass.to(tl.float64) < insufficient).to(tl.int32))
    at_lo = tl.where(below > 0, tl.load(level + tl.maximum(below - 1, 0)), 1 << 62)
    at_hi = tl.where(above < PIVOTS, tl.load(level + tl.minimum(above, PIVOTS - 1)), 0)
    new_lo = tl.where(below > 0, lo + step * (below - 1).to(tl.float32), lo)
    new_hi = tl.where(above < PIVOTS, lo + step * above.to(tl.float32), hi)
    return new_lo, new_hi, at_lo, at_hi


@triton.jit
def pivot_step(lo, hi, row_max, PIVOTS: tl.constexpr):
    return (tl.minimum(hi, row_max) - lo) * (1.0 / PIVOTS)


@triton.jit
def target_bounds(total, k, p, counting):
    """(F that is surely enough, F that is surely too little)."""
    total = total.to(tl.float64)
    goal = tl.where(counting, k.to(tl.float64), p.to(tl.float64) * total)
    doubt = tl.where(counting, 0.0, total * _MAX_RELATIVE_ERROR)
    return goal + doubt, goal - doubt


@triton.jit
def bracket(levels, row_max, row_min, k, p, counting, PIVOTS: tl.constexpr):
    """After both levels: (lo, hi, F(lo), F(hi))."""
    # loads first: they wait for the memory together
    index = tl.arange(0, PIVOTS)
    first, second = tl.load(levels + index), tl.load(levels + PIVOTS + index)
    enough, few = target_bounds(tl.load(levels), k, p, counting)
    found = narrow_bracket(
        levels, first, row_min, tl.full([], POS_INF, tl.float32), row_max, enough, few, PIVOTS
    )
    return narrow_bracket(levels + PIVOTS, second, found[0], found[1], row_max, enough, few, PIVOTS)


@triton.jit
def _interpolate(lo, hi, index):
    """From lo (index 0) to hi (index 9), rising, at least one whole number between the two where
    there is one.
    """
    return lo + (hi - lo) * index.to(tl.int64) // 9


@triton.jit
def _mass_above_keys(
    row_ptr, vocab, temperature, row_max, keys, floor, counting, CHUNK: tl.constexpr
):
    """Over the whole row: how many tokens are not below each of eight keys, nor below floor, or
    what they weigh.
    """
    total = tl.zeros([8, CHUNK], tl.int64)
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = scaled_logits(row_ptr, at, vocab, temperature)
        each = tl.where(
            (x >= floor) & (at < vocab), tl.where(counting, 1, token_weight(x, row_max)), 0
        )
        total += tl.where(float_to_key(x)[None, :] >= keys[:, None], each[None, :], 0)
    return tl.sum(total, axis=1)


@triton.jit
def _search_row(row_ptr, vocab, temperature, row_max, goal, floor, counting, CHUNK: tl.constexpr):
    """The largest value with F ≥ goal, by search over the whole row."""
    lo, hi = float_to_key(floor), float_to_key(row_max) + 1
    while hi - lo > 1:
        keys = _interpolate(lo, hi, 1 + tl.arange(0, 8))
        enough = (
            _mass_above_keys(row_ptr, vocab, temperature, row_max, keys, floor, counting, CHUNK)
            >= goal
        )
        passed = tl.sum(enough.to(tl.int32))
        lo, hi = _interpolate(lo, hi, passed), _interpolate(lo, hi, passed + 1)
    return key_to_float(lo)


@triton.jit
def _tie_break_row(row_ptr, vocab, temperature, equal, rank, CHUNK: tl.constexpr):
    """The id of the ``rank``-th token (from 1) whose value is ``equal``; vocab where there are not
    so many.
    """
    cut, seen = vocab, rank * 0
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        ties = (scaled_logits(row_ptr, at, vocab, temperature) == equal) & (at < vocab)
        running = seen + tl.cumsum(ties.to(tl.int32), 0).to(tl.int64)
        cut = tl.minimum(cut, tl.min(tl.where(ties & (running == rank), at, vocab)))
        seen += tl.sum(ties.to(tl.int32)).to(tl.int64)
    return cut


@triton.jit
def _search_gathered(keys, each, lo, hi, goal):
    """The largest key with F ≥ goal among those gathered; F(lo) ≥ goal > F(hi)."""
    while hi - lo > 1:
        pivots = _interpolate(lo, hi, 1 + tl.arange(0, 8))
        enough = (
            tl.sum(tl.where(keys[None, :] >= pivots[:, None], each[None, :], 0), axis=1) >= goal
        )
        passed = tl.sum(enough.to(tl.int32))
        lo, hi = _interpolate(lo, hi, passed), _interpolate(lo, hi, passed + 1)
    return lo


@triton.jit
def _tie_break_gathered(ties, ids, rank, vocab):
    """The ``rank``-th lowest id (from 1) among the ties; vocab where there are no more than
    that.
    """
    lo, hi = rank * 0 - 1, rank * 0 + vocab
    if tl.sum(ties.to(tl.int64)) > rank:
        while hi - lo > 1:
            middle = lo + (hi - lo) // 2
            if tl.sum((ties & (ids <= middle)).to(tl.int64)) >= rank:
                hi = middle
            else:
                lo = middle
    return hi.to(tl.int32)


@triton.jit
def threshold_from_gathered(
    levels, words, vocab, row_max, row_min, k, p, counting,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """(threshold, last id among tokens of just that value, whether they are right) from HELD
    gathered tokens.
    """
    index = tl.arange(0, HELD)
    x = bits_to_float(tl.load(words + 3 * CHUNKS + 2 + index))
    ids = tl.load(words + 3 * CHUNKS + 2 + GATHERED + index)
    got = tl.load(levels + 2 * PIVOTS + GOT)
    above = tl.load(levels + 2 * PIVOTS + ABOVE)
    total = tl.load(levels + 2 * PIVOTS + TOTAL)
    lo, hi, at_lo, at_hi = bracket(levels, row_max, row_min, k, p, counting, PIVOTS)
    x = tl.where(index < got, x, NEG_INF)
    keys, weight = float_to_key(x), token_weight(x, row_max)
    top = tl.where(hi < POS_INF, float_to_key(hi), float_to_key(row_max) + 1)
    floor, start = tl.full([], NEG_INF, tl.float32), float_to_key(lo)
    reached = counting == 0
    if counting:
        # all that top-k leaves has been gathered, or what lies between the pivots
        reached = at_lo <= GATHERED
        goal = k.to(tl.int64) - tl.where(reached, 0, at_hi)
        start = _search_gathered(keys, (index < got).to(tl.int64), start, top, goal)
        floor, top = key_to_float(start), float_to_key(row_max) + 1
        weight = tl.where(x >= floor, weight, 0)
        above, total = above * 0, tl.sum(weight)
    threshold, cut = floor, vocab
    right = counting & (p >= 1.0)
    if p < 1.0:
        goal = ceil_fraction(p, total)
        right = reached & (above < goal) & (above + tl.sum(weight) >= goal)
        if right:
            threshold = key_to_float(_search_gathered(keys, weight, start, top, goal - above))
            above += tl.sum(tl.where(x > threshold, weight, 0))
            each = tl.max(tl.where(x == threshold, weight, 0))
            cut = _tie_break_gathered(x == threshold, ids, (goal - above + each - 1) // each, vocab)
    return threshold, cut, right


@triton.jit
def threshold_from_row(
    row_ptr, vocab, temperature, row_max, k, p, searching, floor, CHUNK: tl.constexpr
):
    """The same from the whole row, whatever stands in it.

    searching: whether top-k's threshold is not ``floor`` yet.
    """
    if searching:
        floor = _search_row(
            row_ptr, vocab, temperature, row_max, k.to(tl.int64), floor, True, CHUNK
        )
    threshold, cut = floor, vocab
    if p < 1.0:
        none = tl.zeros([8], tl.int64)
        total = tl.max(
            _mass_above_keys(
                row_ptr,
                vocab,
                temperature,
                row_max,
                none + float_to_key(floor),
                floor,
                False,
                CHUNK,
            )
        )
        goal = ceil_fraction(p, total)
        threshold = _search_row(row_ptr, vocab, temperature, row_max, goal, floor, False, CHUNK)
        each = tl.max(token_weight(tl.zeros([1], tl.float32) + threshold, row_max))
        above = tl.max(
            _mass_above_keys(
                row_ptr,
                vocab,
                temperature,
                row_max,
                none + float_to_key(threshold) + 1,
                threshold,
                False,
                CHUNK,
            )
        )
        cut = _tie_break_row(
            row_ptr, vocab, temperature, threshold, (goal - above + each - 1) // each, CHUNK
        )
    return threshold, cut
