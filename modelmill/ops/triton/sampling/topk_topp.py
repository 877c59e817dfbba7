"""Threshold of top-k and top-p for a row, without a sort; device functions of ``sample.py``.

Computes: the threshold of top-k or top-p of one row
Dtypes: float32 logits; integer probabilities
Layout: a row in memory, gathered values between two pivots
Range: any vocab below 2^22
Technique: pivots, then bisection
Used by: sample.py

F of a value is the number of tokens not below it (top-k), or their weight (top-p). It is computed
first at evenly spaced pivots, then exactly among the few tokens gathered between two pivots, or
over the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modelmill.ops.triton.sampling.integer_probs import (
    NEG_INF,
    POS_INF,
    bits_to_float,
    ceil_fraction,
    float_to_key,
    key_to_float,
    load_temperature_scaled_logits,
    token_weight,
)

# tokens further below the maximum have weight 0: 2^-40 is e^-27.7
_LOGIT_SPAN = tl.constexpr(28.0)
# relative to the total: several times the error of the approximate weights
_MAX_RELATIVE_ERROR = tl.constexpr(2.0**-16)

# Scratch memory of a row. scratch64 (int64): F of the pivots of both levels, four totals
# (NUM_GATHERED_SLOT, TOTAL_WEIGHT_SLOT, WEIGHT_ABOVE_BRACKET_SLOT), weight of each chunk. scratch32
# (int32, or float32 bits): maximum, minimum and index of the maximum of each chunk; the threshold
# and the last id among tokens equal to it; the gathered values and their ids.
NUM_GATHERED_SLOT, TOTAL_WEIGHT_SLOT, WEIGHT_ABOVE_BRACKET_SLOT = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
)


@triton.jit
def scratch64_row_ptr(scratch64_ptr, row, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr):
    """Address of a row's 64-bit scratch memory."""
    return scratch64_ptr + row * (2 * PIVOTS + 4 + CHUNKS)


@triton.jit
def scratch32_row_ptr(scratch32_ptr, row, CHUNKS: tl.constexpr, GATHERED: tl.constexpr):
    """Address of a row's 32-bit scratch memory."""
    return scratch32_ptr + row * (3 * CHUNKS + 2 + 2 * GATHERED)


@triton.jit
def load_topk_topp_params(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
    """(k, p, whether tokens are counted, whether a threshold is needed at all)."""
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    counting = (k > 0) & (k < vocab)
    return k, p, counting, (tl.load(temperature_ptr + row) > 0) & (counting | (p < 1.0))


@triton.jit
def load_row_max_and_floor(
    scratch32_ptr, row, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GATHERED: tl.constexpr
):
    """(address of a row's 32-bit scratch memory, maximum, smallest value that needs a pivot)."""
    scratch32 = scratch32_row_ptr(scratch32_ptr, row, CHUNKS, GATHERED)
    index = tl.arange(0, CHUNKS)
    inside = index * CHUNK < vocab
    row_max = tl.max(
        tl.where(inside, bits_to_float(tl.load(scratch32 + index, mask=inside, other=0)), NEG_INF)
    )
    row_min = tl.min(
        tl.where(
            inside,
            bits_to_float(tl.load(scratch32 + CHUNKS + index, mask=inside, other=0)),
            POS_INF,
        )
    )
    return scratch32, row_max, tl.maximum(row_min, row_max - _LOGIT_SPAN)


@triton.jit
def narrow_bracket(level, mass, lo, hi, row_max, sufficient, insufficient, PIVOTS: tl.constexpr):
    """The pivots around the threshold: (lo, hi, F(lo), F(hi)).

    hi is inf if every pivot has enough above it. F(lo) exceeds any number if no pivot surely has
    enough.
    """
    step = pivot_step(lo, hi, row_max, PIVOTS)
    # F decreases from pivot to pivot
    below = tl.sum((mass.to(tl.float64) >= sufficient).to(tl.int32))
    above = PIVOTS - tl.sum((mass.to(tl.float64) < insufficient).to(tl.int32))
    at_lo = tl.where(below > 0, tl.load(level + tl.maximum(below - 1, 0)), 1 << 62)
    at_hi = tl.where(above < PIVOTS, tl.load(level + tl.minimum(above, PIVOTS - 1)), 0)
    new_lo = tl.where(below > 0, lo + step * (below - 1).to(tl.float32), lo)
    new_hi = tl.where(above < PIVOTS, lo + step * above.to(tl.float32), hi)
    return new_lo, new_hi, at_lo, at_hi


@triton.jit
def pivot_step(lo, hi, row_max, PIVOTS: tl.constexpr):
    """Return the distance between the pivots of one bisection round."""
    return (tl.minimum(hi, row_max) - lo) * (1.0 / PIVOTS)


@triton.jit
def target_bounds(total, k, p, counting):
    """(F that is surely sufficient, F that is surely insufficient)."""
    total = total.to(tl.float64)
    goal = tl.where(counting, k.to(tl.float64), p.to(tl.float64) * total)
    error_bound = tl.where(counting, 0.0, total * _MAX_RELATIVE_ERROR)
    return goal + error_bound, goal - error_bound


@triton.jit
def find_threshold_bracket(scratch64, row_max, row_min, k, p, counting, PIVOTS: tl.constexpr):
    """The pivots around the threshold after both levels: (lo, hi, F(lo), F(hi))."""
    # loads first, so that their latencies overlap
    index = tl.arange(0, PIVOTS)
    first, second = tl.load(scratch64 + index), tl.load(scratch64 + PIVOTS + index)
    sufficient, insufficient = target_bounds(tl.load(scratch64), k, p, counting)
    narrowed = narrow_bracket(
        scratch64,
        first,
        row_min,
        tl.full([], POS_INF, tl.float32),
        row_max,
        sufficient,
        insufficient,
        PIVOTS,
    )
    return narrow_bracket(
        scratch64 + PIVOTS,
        second,
        narrowed[0],
        narrowed[1],
        row_max,
        sufficient,
        insufficient,
        PIVOTS,
    )


@triton.jit
def _interpolate_keys(lo, hi, index):
    """Integers from lo (index 0) to hi (index 9), increasing.

    At least one integer is between the two if there is one.
    """
    return lo + (hi - lo) * index.to(tl.int64) // 9


@triton.jit
def _mass_above_keys(
    row_ptr, vocab, temperature, row_max, keys, floor, counting, CHUNK: tl.constexpr
):
    """Over the whole row: count or weight of tokens ≥ each of eight keys and ≥ floor."""
    total = tl.zeros([8, CHUNK], tl.int64)
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = load_temperature_scaled_logits(row_ptr, at, vocab, temperature)
        token_mass = tl.where(
            (x >= floor) & (at < vocab), tl.where(counting, 1, token_weight(x, row_max)), 0
        )
        total += tl.where(float_to_key(x)[None, :] >= keys[:, None], token_mass[None, :], 0)
    return tl.sum(total, axis=1)


@triton.jit
def _search_row(row_ptr, vocab, temperature, row_max, goal, floor, counting, CHUNK: tl.constexpr):
    """The largest value with F ≥ goal, by search over the whole row."""
    lo, hi = float_to_key(floor), float_to_key(row_max) + 1
    while hi - lo > 1:
        keys = _interpolate_keys(lo, hi, 1 + tl.arange(0, 8))
        sufficient = (
            _mass_above_keys(row_ptr, vocab, temperature, row_max, keys, floor, counting, CHUNK)
            >= goal
        )
        num_sufficient = tl.sum(sufficient.to(tl.int32))
        lo, hi = (
            _interpolate_keys(lo, hi, num_sufficient),
            _interpolate_keys(lo, hi, num_sufficient + 1),
        )
    return key_to_float(lo)


@triton.jit
def _tie_break_row(row_ptr, vocab, temperature, equal, rank, CHUNK: tl.constexpr):
    """The id of the ``rank``-th token (from 1) equal to ``equal``; vocab if there are fewer."""
    last_id, num_ties = vocab, rank * 0
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        ties = (load_temperature_scaled_logits(row_ptr, at, vocab, temperature) == equal) & (
            at < vocab
        )
        rank_of_tie = num_ties + tl.cumsum(ties.to(tl.int32), 0).to(tl.int64)
        last_id = tl.minimum(last_id, tl.min(tl.where(ties & (rank_of_tie == rank), at, vocab)))
        num_ties += tl.sum(ties.to(tl.int32)).to(tl.int64)
    return last_id


@triton.jit
def _search_gathered(keys, masses, lo, hi, goal):
    """The largest key with F ≥ goal among the gathered tokens; F(lo) ≥ goal > F(hi)."""
    while hi - lo > 1:
        pivots = _interpolate_keys(lo, hi, 1 + tl.arange(0, 8))
        sufficient = (
            tl.sum(tl.where(keys[None, :] >= pivots[:, None], masses[None, :], 0), axis=1) >= goal
        )
        num_sufficient = tl.sum(sufficient.to(tl.int32))
        lo, hi = (
            _interpolate_keys(lo, hi, num_sufficient),
            _interpolate_keys(lo, hi, num_sufficient + 1),
        )
    return lo


@triton.jit
def _tie_break_gathered(ties, ids, rank, vocab):
    """The ``rank``-th lowest id (from 1) among the ties; vocab if there are no more than that."""
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
    scratch64, scratch32, vocab, row_max, row_min, k, p, counting,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, NUM_LOADED: tl.constexpr,
):  # fmt: skip
    """Threshold from the first NUM_LOADED gathered tokens.

    Returns:
        (threshold, last id among tokens equal to it, whether they are exact).
    """
    index = tl.arange(0, NUM_LOADED)
    x = bits_to_float(tl.load(scratch32 + 3 * CHUNKS + 2 + index))
    ids = tl.load(scratch32 + 3 * CHUNKS + 2 + GATHERED + index)
    num_gathered = tl.load(scratch64 + 2 * PIVOTS + NUM_GATHERED_SLOT)
    above = tl.load(scratch64 + 2 * PIVOTS + WEIGHT_ABOVE_BRACKET_SLOT)
    total = tl.load(scratch64 + 2 * PIVOTS + TOTAL_WEIGHT_SLOT)
    lo, hi, at_lo, at_hi = find_threshold_bracket(
        scratch64, row_max, row_min, k, p, counting, PIVOTS
    )
    x = tl.where(index < num_gathered, x, NEG_INF)
    keys, weight = float_to_key(x), token_weight(x, row_max)
    top = tl.where(hi < POS_INF, float_to_key(hi), float_to_key(row_max) + 1)
    floor, start = tl.full([], NEG_INF, tl.float32), float_to_key(lo)
    bracketed = counting == 0
    if counting:
        # either all tokens that top-k keeps have been gathered, or those between the pivots
        bracketed = at_lo <= GATHERED
        goal = k.to(tl.int64) - tl.where(bracketed, 0, at_hi)
        start = _search_gathered(keys, (index < num_gathered).to(tl.int64), start, top, goal)
        floor, top = key_to_float(start), float_to_key(row_max) + 1
        weight = tl.where(x >= floor, weight, 0)
        above, total = above * 0, tl.sum(weight)
    threshold, last_id = floor, vocab
    exact = counting & (p >= 1.0)
    if p < 1.0:
        goal = ceil_fraction(p, total)
        exact = bracketed & (above < goal) & (above + tl.sum(weight) >= goal)
        if exact:
            threshold = key_to_float(_search_gathered(keys, weight, start, top, goal - above))
            above += tl.sum(tl.where(x > threshold, weight, 0))
            tie_weight = tl.max(tl.where(x == threshold, weight, 0))
            last_id = _tie_break_gathered(
                x == threshold, ids, (goal - above + tie_weight - 1) // tie_weight, vocab
            )
    return threshold, last_id, exact


@triton.jit
def threshold_from_row(
    row_ptr, vocab, temperature, row_max, k, p, searching, floor, CHUNK: tl.constexpr
):
    """The same from the whole row, for any values.

    searching: whether top-k's threshold still has to be searched; otherwise it is ``floor``.
    """
    if searching:
        floor = _search_row(
            row_ptr, vocab, temperature, row_max, k.to(tl.int64), floor, True, CHUNK
        )
    threshold, last_id = floor, vocab
    if p < 1.0:
        zeros8 = tl.zeros([8], tl.int64)
        total = tl.max(
            _mass_above_keys(
                row_ptr,
                vocab,
                temperature,
                row_max,
                zeros8 + float_to_key(floor),
                floor,
                False,
                CHUNK,
            )
        )
        goal = ceil_fraction(p, total)
        threshold = _search_row(row_ptr, vocab, temperature, row_max, goal, floor, False, CHUNK)
        tie_weight = tl.max(token_weight(tl.zeros([1], tl.float32) + threshold, row_max))
        above = tl.max(
            _mass_above_keys(
                row_ptr,
                vocab,
                temperature,
                row_max,
                zeros8 + float_to_key(threshold) + 1,
                threshold,
                False,
                CHUNK,
            )
        )
        last_id = _tie_break_row(
            row_ptr,
            vocab,
            temperature,
            threshold,
            (goal - above + tie_weight - 1) // tie_weight,
            CHUNK,
        )
    return threshold, last_id
