"""A token for each row without a sort: seven small kernels, several programs a row, ids as the reference gives them.

Where top-k or top-p ask for a threshold, two passes count (or weigh, approximately) what lies above evenly spread
pivots, the second between two pivots of the first. What is left between two pivots of the second is gathered, usually
a few hundred tokens, and there one program finds the threshold exactly. Whether the gathered tokens suffice is checked
in whole numbers; where they do not (thousands of tokens within a thousandth of the range), the same program bisects
over the whole row: slow, and right. Nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import power_of_two
from modelmill.ops.triton.early import enter, launch

PIVOTS = 32
GATHERED = 4096
_FEW_ROWS = 6  # up to so many, smaller chunks fill the chip

_LOG2E = tl.constexpr(1.4426950408889634)
_C1, _C2, _C3 = tl.constexpr(0.6931470632553101), tl.constexpr(0.2402293086051941), tl.constexpr(0.055485282093286514)
_C4, _C5 = tl.constexpr(0.00967545248568058), tl.constexpr(0.0012467841152101755)
_C6 = tl.constexpr(0.0002161293086828664)
_SPAN = tl.constexpr(28.0)  # what lies further below the maximum weighs nothing: 2^-40 is e^-27.7
_ERROR = tl.constexpr(2.0**-16)  # of the whole: several times what the approximate weights may be off
_NEVER = tl.constexpr(float("-inf"))
_EVER = tl.constexpr(float("inf"))


def supports(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> bool:
    """float32 rows with their columns side by side, and the parameters in the reference's dtypes."""
    real = all(t.dtype is torch.float32 for t in (logits, temperature, top_p, min_p))
    plain = all(t.is_contiguous() for t in (temperature, top_k, top_p, min_p, noise))
    known = real and top_k.dtype is torch.int32 and noise.dtype is torch.float64
    return known and plain and logits.stride(1) == 1 and logits.numel() > 0 and logits.shape[1] < 1 << 22


def run(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """As the reference, to the bit."""
    rows, vocab = logits.shape
    chunk = 1024 if rows <= _FEW_ROWS else 4096
    count = triton.cdiv(vocab, chunk)
    padded = power_of_two(count)
    sums = torch.empty((rows, 2 * PIVOTS + 4 + padded), dtype=torch.int64, device=logits.device)
    words = torch.empty((rows, 2 + 3 * padded + 2 * GATHERED), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    where = (logits, logits.stride(0), vocab, temperature, sums, words)
    sizes = {"CHUNK": chunk, "CHUNKS": padded, "PIVOTS": PIVOTS, "GATHERED": GATHERED}
    # a fused multiply-add would change last bits, and so the ids
    how = {**launch(logits.device, rows), "enable_fp_fusion": False}
    warps = chunk // 256 if chunk < 2048 else 8
    grid = (count, rows)
    _peaks[grid](*where, **sizes, num_warps=warps, **how)
    for level in (0, 1):
        _level[grid](*where, top_k, top_p, LEVEL=level, **sizes, num_warps=warps, **how)
    _gather[grid](*where, top_k, top_p, **sizes, num_warps=warps, **how)
    _settle[(rows,)](*where, top_k, top_p, **sizes, num_warps=8, **how)
    _weigh[grid](*where, min_p, **sizes, num_warps=warps, **how)
    _pick[(rows,)](*where, min_p, noise, out, **sizes, num_warps=warps, **how)
    return out


# A row's scratch. sums (int64): F of each level's pivots, four totals (_GOT, _TOTAL, _ABOVE), each chunk's weight.
# words (int32, or float32 bits): each chunk's maximum, least value and place of the maximum; the threshold and the last
# id among those equal to it; the gathered values and their ids.
_GOT, _TOTAL, _ABOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _sums(sums_ptr, row, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr):
    return sums_ptr + row * (2 * PIVOTS + 4 + CHUNKS)


@triton.jit
def _words(words_ptr, row, CHUNKS: tl.constexpr, GATHERED: tl.constexpr):
    return words_ptr + row * (3 * CHUNKS + 2 + 2 * GATHERED)


@triton.jit
def _real(word):
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _word(real):
    return real.to(tl.int32, bitcast=True)


@triton.jit
def _scaled(row_ptr, at, vocab, temperature):
    """Logits times 1 / temperature; NaN and what lies outside are −inf."""
    x = tl.load(row_ptr + at, mask=at < vocab, other=_NEVER)
    warmth = tl.where(temperature > 0, temperature, 1.0)
    return tl.where(x == x, x, _NEVER) * tl.math.div_rn(tl.full([], 1.0, tl.float32), warmth)


@triton.jit
def _depth(x, most):
    """The base-2 logarithm of a token's share of the likeliest one's, from −60."""
    return tl.maximum(tl.where(x == most, 0.0, x - most) * _LOG2E, -60.0)


@triton.jit
def _weight(x, most):
    """As the reference's, operation by operation."""
    z = _depth(x, most)
    whole = tl.floor(z)
    part = z - whole
    power = (((((part * _C6 + _C5) * part + _C4) * part + _C3) * part + _C2) * part + _C1) * part
    bits = ((power + 1.0) * 8388608.0).to(tl.int32).to(tl.int64)
    return tl.where(x > _NEVER, (bits << 17) >> (-whole).to(tl.int32).to(tl.int64), 0)


@triton.jit
def _key(x):
    """Whole numbers in the order of the floats, −0 as 0."""
    bits = _word(tl.where(x == 0.0, 0.0, x))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return _real(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _share(p, total):
    """ceil(p · total)."""
    exact = p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    return whole + (whole.to(tl.float64) < exact).to(tl.int64)


@triton.jit
def _range(words, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """(maximum, least value worth a pivot) of a row."""
    index = tl.arange(0, CHUNKS)
    inside = index * CHUNK < vocab
    most = tl.max(tl.where(inside, _real(tl.load(words + index, mask=inside, other=0)), _NEVER))
    least = tl.min(tl.where(inside, _real(tl.load(words + CHUNKS + index, mask=inside, other=0)), _EVER))
    return most, tl.maximum(least, most - _SPAN)


@triton.jit
def _narrowed(level, lo, hi, most, enough, few, PIVOTS: tl.constexpr):
    """The pivots around the threshold: (lo, hi, F(lo), F(hi)), hi = inf where every pivot has enough above it."""
    index = tl.arange(0, PIVOTS)
    mass = tl.load(level + index)
    pivot = lo + _step(lo, hi, most, PIVOTS) * index.to(tl.float32)
    above, below = mass.to(tl.float64) < few, mass.to(tl.float64) >= enough
    new_lo = tl.max(tl.where(below, pivot, lo))
    new_hi = tl.min(tl.where(above, pivot, hi))
    at_lo = tl.min(tl.where(below, mass, 1 << 62))
    at_hi = tl.max(tl.where(above, mass, 0))
    return new_lo, new_hi, at_lo, at_hi


@triton.jit
def _step(lo, hi, most, PIVOTS: tl.constexpr):
    return (tl.minimum(hi, most) - lo) * (1.0 / PIVOTS)


@triton.jit
def _goals(levels, k, p, counting):
    """(F that is surely enough, F that is surely too little)."""
    total = tl.load(levels).to(tl.float64)
    goal = tl.where(counting, k.to(tl.float64), p.to(tl.float64) * total)
    doubt = tl.where(counting, 0.0, total * _ERROR)
    return goal + doubt, goal - doubt


@triton.jit(do_not_specialize=["vocab"])
def _peaks(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each chunk's maximum, the first place where it stands, and its least value above −inf; totals set to 0."""
    enter(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row))
    most = tl.max(x)
    words = _words(words_ptr, row, CHUNKS, GATHERED)
    tl.store(words + chunk, _word(most))
    tl.store(words + CHUNKS + chunk, _word(tl.min(tl.where(x > _NEVER, x, _EVER))))
    tl.store(words + 2 * CHUNKS + chunk, tl.min(tl.where((x == most) & (at < vocab), at, 2147483647)))
    if chunk == 0:
        levels = _sums(sums_ptr, row, CHUNKS, PIVOTS)
        tl.store(levels + tl.arange(0, 2 * PIVOTS), tl.zeros([2 * PIVOTS], tl.int64))
        tl.store(levels + 2 * PIVOTS + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit
def _asked(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab):
    """(k, p, whether tokens are counted, whether a threshold is wanted at all)."""
    k, p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    counting = (k > 0) & (k < vocab)
    return k, p, counting, (tl.load(temperature_ptr + row) > 0) & (counting | (p < 1.0))


@triton.jit(do_not_specialize=["vocab"])
def _level(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, top_k_ptr, top_p_ptr, LEVEL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """F of evenly spread pivots: how many tokens are not below each, or how much they weigh (approximately)."""
    enter(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, counting, wanted = _asked(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    words = _words(words_ptr, row, CHUNKS, GATHERED)
    most, lo = _range(words, vocab, CHUNK, CHUNKS)
    if wanted & (most > _NEVER) & (most < _EVER):
        levels = _sums(sums_ptr, row, CHUNKS, PIVOTS)
        hi = tl.full([], _EVER, tl.float32)
        if LEVEL == 1:
            enough, few = _goals(levels, k, p, counting)
            found = _narrowed(levels, lo, hi, most, enough, few, PIVOTS)
            lo, hi = found[0], found[1]
        if _real(tl.load(words + chunk)) >= lo:
            step = _step(lo, hi, most, PIVOTS)
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = _scaled(logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row))
            each = tl.where(counting, 1.0, tl.exp2(_depth(x, most)))
            scale = tl.where(counting, 1.0, 1099511627776.0)
            for first in range(0, PIVOTS, 8):
                index = first + tl.arange(0, 8)
                above = x[None, :] >= (lo + step * index.to(tl.float32))[:, None]
                mass = (tl.sum(tl.where(above, each[None, :], 0.0), axis=1) * scale).to(tl.int64)
                tl.atomic_add(levels + LEVEL * PIVOTS + index, mass, mask=mass > 0, sem="relaxed")


@triton.jit
def _bracket(levels, most, least, k, p, counting, PIVOTS: tl.constexpr):
    """After both levels: (lo, hi, F(lo), F(hi))."""
    enough, few = _goals(levels, k, p, counting)
    found = _narrowed(levels, least, tl.full([], _EVER, tl.float32), most, enough, few, PIVOTS)
    return _narrowed(levels + PIVOTS, found[0], found[1], most, enough, few, PIVOTS)


@triton.jit(do_not_specialize=["vocab"])
def _gather(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Collect the tokens between the pivots, or all above the lower one where top-k leaves few; weigh the others."""
    enter(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, counting, wanted = _asked(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    words = _words(words_ptr, row, CHUNKS, GATHERED)
    most, least = _range(words, vocab, CHUNK, CHUNKS)
    if wanted & (most > _NEVER) & (most < _EVER):
        levels = _sums(sums_ptr, row, CHUNKS, PIVOTS)
        lo, hi, at_lo, _at_hi = _bracket(levels, most, least, k, p, counting, PIVOTS)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _scaled(logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row))
        if counting == 0:
            weight = _weight(x, most)
            tl.atomic_add(levels + 2 * PIVOTS + _TOTAL, tl.sum(weight), sem="relaxed")
            tl.atomic_add(levels + 2 * PIVOTS + _ABOVE, tl.sum(tl.where(x >= hi, weight, 0)), sem="relaxed")
        take = (x >= lo) & ((x < hi) | (counting & (at_lo <= GATHERED)))
        counter = levels + 2 * PIVOTS + _GOT + tl.zeros([CHUNK], tl.int32)
        place = tl.atomic_add(counter, take.to(tl.int64), mask=take, sem="relaxed")
        take = take & (place < GATHERED)
        tl.store(words + 3 * CHUNKS + 2 + place, _word(x), mask=take)
        tl.store(words + 3 * CHUNKS + 2 + GATHERED + place, at, mask=take)


@triton.jit
def _split(lo, hi):
    """Eight whole numbers from lo on, below hi, at least one of them between."""
    return lo + (hi - lo) * (tl.arange(0, 8) + 1).to(tl.int64) // 9


@triton.jit
def _mass(row_ptr, vocab, temperature, most, keys, floor, counting, CHUNK: tl.constexpr):
    """Over the whole row: how many tokens are not below each of eight keys, nor below floor, or what they weigh."""
    total = tl.zeros([8], tl.int64)
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        x = _scaled(row_ptr, at, vocab, temperature)
        each = tl.where((x >= floor) & (at < vocab), tl.where(counting, 1, _weight(x, most)), 0)
        total += tl.sum(tl.where(_key(x)[None, :] >= keys[:, None], each[None, :], 0), axis=1)
    return total


@triton.jit
def _row_search(row_ptr, vocab, temperature, most, goal, floor, counting, CHUNK: tl.constexpr):
    """The largest value with F ≥ goal, by search over the whole row."""
    lo, hi = _key(floor), _key(most) + 1
    while hi - lo > 1:
        keys = _split(lo, hi)
        enough = _mass(row_ptr, vocab, temperature, most, keys, floor, counting, CHUNK) >= goal
        lo = tl.max(tl.where(enough, keys, lo))
        hi = tl.min(tl.where(enough, hi, keys))
    return _value(lo)


@triton.jit
def _row_cut(row_ptr, vocab, temperature, equal, rank, CHUNK: tl.constexpr):
    """The id of the ``rank``-th token (from 1) whose value is ``equal``; vocab where there are not so many."""
    cut, seen = vocab, rank * 0
    for start in range(0, vocab, CHUNK):
        at = start + tl.arange(0, CHUNK)
        ties = (_scaled(row_ptr, at, vocab, temperature) == equal) & (at < vocab)
        running = seen + tl.cumsum(ties.to(tl.int32), 0).to(tl.int64)
        cut = tl.minimum(cut, tl.min(tl.where(ties & (running == rank), at, vocab)))
        seen += tl.sum(ties.to(tl.int32)).to(tl.int64)
    return cut


@triton.jit
def _search(keys, each, lo, hi, goal):
    """The largest key with F ≥ goal among those gathered; F(lo) ≥ goal > F(hi)."""
    while hi - lo > 1:
        pivots = _split(lo, hi)
        enough = tl.sum(tl.where(keys[None, :] >= pivots[:, None], each[None, :], 0), axis=1) >= goal
        lo = tl.max(tl.where(enough, pivots, lo))
        hi = tl.min(tl.where(enough, hi, pivots))
    return lo


@triton.jit
def _cut(ties, ids, rank, vocab):
    """The ``rank``-th lowest id (from 1) among the ties; vocab where there are not so many."""
    lo, hi = rank * 0 - 1, rank * 0 + vocab
    if tl.sum(ties.to(tl.int64)) >= rank:
        while hi - lo > 1:
            middle = lo + (hi - lo) // 2
            if tl.sum((ties & (ids <= middle)).to(tl.int64)) >= rank:
                hi = middle
            else:
                lo = middle
    return hi.to(tl.int32)


@triton.jit
def _held(
    levels, words, vocab, most, least, k, p, counting,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """(threshold, last id among tokens of just that value, whether they are right) from HELD gathered tokens."""
    lo, hi, at_lo, at_hi = _bracket(levels, most, least, k, p, counting, PIVOTS)
    got = tl.load(levels + 2 * PIVOTS + _GOT)
    index = tl.arange(0, HELD)
    x = _real(tl.load(words + 3 * CHUNKS + 2 + index, mask=index < got, other=0))
    x = tl.where(index < got, x, _NEVER)
    ids = tl.load(words + 3 * CHUNKS + 2 + GATHERED + index, mask=index < got, other=0)
    keys, weight = _key(x), _weight(x, most)
    top = tl.where(hi < _EVER, _key(hi), _key(most) + 1)
    above = tl.load(levels + 2 * PIVOTS + _ABOVE)
    total = tl.load(levels + 2 * PIVOTS + _TOTAL)
    floor, start = tl.full([], _NEVER, tl.float32), _key(lo)
    reached = counting == 0
    if counting:
        # all that top-k leaves has been gathered, or what lies between the pivots
        reached = at_lo <= GATHERED
        goal = k.to(tl.int64) - tl.where(reached, 0, at_hi)
        start = _search(keys, (index < got).to(tl.int64), start, top, goal)
        floor, top = _value(start), _key(most) + 1
        weight = tl.where(x >= floor, weight, 0)
        above, total = above * 0, tl.sum(weight)
    threshold, cut = floor, vocab
    right = counting & (p >= 1.0)
    if p < 1.0:
        goal = _share(p, total)
        right = reached & (above < goal) & (above + tl.sum(weight) >= goal)
        if right:
            threshold = _value(_search(keys, weight, start, top, goal - above))
            above += tl.sum(tl.where(x > threshold, weight, 0))
            each = tl.max(tl.where(x == threshold, weight, 0))
            cut = _cut(x == threshold, ids, (goal - above + each - 1) // each, vocab)
    return threshold, cut, right


@triton.jit
def _by_row(row_ptr, vocab, temperature, most, k, p, counting, CHUNK: tl.constexpr):
    """The same from the whole row, whatever stands in it."""
    floor = tl.full([], _NEVER, tl.float32)
    if most == _EVER:
        floor = -most
    if counting:
        floor = _row_search(row_ptr, vocab, temperature, most, k.to(tl.int64), floor, True, CHUNK)
    threshold, cut = floor, vocab
    if p < 1.0:
        none = tl.zeros([8], tl.int64)
        total = tl.max(_mass(row_ptr, vocab, temperature, most, none + _key(floor), floor, False, CHUNK))
        goal = _share(p, total)
        threshold = _row_search(row_ptr, vocab, temperature, most, goal, floor, False, CHUNK)
        each = tl.max(_weight(tl.zeros([1], tl.float32) + threshold, most))
        above = tl.max(_mass(row_ptr, vocab, temperature, most, none + _key(threshold) + 1, threshold, False, CHUNK))
        cut = _row_cut(row_ptr, vocab, temperature, threshold, (goal - above + each - 1) // each, CHUNK)
    return threshold, cut


@triton.jit(do_not_specialize=["vocab"])
def _settle(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The threshold that top-k and top-p leave, and the last id among tokens of just that value."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    k, p, counting, wanted = _asked(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    words = _words(words_ptr, row, CHUNKS, GATHERED)
    levels = _sums(sums_ptr, row, CHUNKS, PIVOTS)
    most, least = _range(words, vocab, CHUNK, CHUNKS)
    temperature = tl.load(temperature_ptr + row)
    row_ptr = logits_ptr + row * stride
    threshold, cut = tl.full([], _NEVER, tl.float32), vocab
    if most == _EVER:
        threshold = -most
    if wanted & (most > _NEVER):
        right = most < _NEVER
        got = tl.load(levels + 2 * PIVOTS + _GOT)
        # where k reaches down to tokens without weight, the pivots do not reach its threshold
        if (most < _EVER) & ((counting == 0) | (tl.load(levels) >= k)):
            if got <= GATHERED // 4:
                threshold, cut, right = _held(
                    levels, words, vocab, most, least, k, p, counting, CHUNKS, PIVOTS, GATHERED, GATHERED // 4
                )
            elif got <= GATHERED:
                threshold, cut, right = _held(
                    levels, words, vocab, most, least, k, p, counting, CHUNKS, PIVOTS, GATHERED, GATHERED
                )
        if right == 0:
            threshold, cut = _by_row(row_ptr, vocab, temperature, most, k, p, counting, 1024)
    tl.store(words + 3 * CHUNKS, _word(threshold))
    tl.store(words + 3 * CHUNKS + 1, cut)


@triton.jit
def _kept(row_ptr, at, vocab, temperature, most, state, min_p_ptr, row):
    """Weights of the tokens that every filter keeps."""
    x = _scaled(row_ptr, at, vocab, temperature)
    threshold, cut = _real(tl.load(state)), tl.load(state + 1)
    weight = _weight(x, most)
    least = _share(tl.load(min_p_ptr + row), tl.full([], 1099511627776, tl.int64))
    keep = (x > threshold) | ((x == threshold) & (at <= cut))
    return tl.where(keep & (weight >= least), weight, 0)


@triton.jit(do_not_specialize=["vocab"])
def _weigh(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, min_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What is kept of each chunk."""
    enter(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        words = _words(words_ptr, row, CHUNKS, GATHERED)
        most = _range(words, vocab, CHUNK, CHUNKS)[0]
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _kept(logits_ptr + row * stride, at, vocab, temperature, most, words + 3 * CHUNKS, min_p_ptr, row)
        levels = _sums(sums_ptr, row, CHUNKS, PIVOTS)
        tl.store(levels + 2 * PIVOTS + 4 + chunk, tl.sum(weight))


@triton.jit(do_not_specialize=["vocab"])
def _pick(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, min_p_ptr, noise_ptr, out_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The id: the place of the maximum, or where the running sum of what is kept passes the noise's share of it."""
    enter(EARLY)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    words = _words(words_ptr, row, CHUNKS, GATHERED)
    most = _range(words, vocab, CHUNK, CHUNKS)[0]
    index = tl.arange(0, CHUNKS)
    inside = index * CHUNK < vocab
    if temperature > 0:
        levels = _sums(sums_ptr, row, CHUNKS, PIVOTS)
        running = tl.cumsum(tl.load(levels + 2 * PIVOTS + 4 + index, mask=inside, other=0), 0)
        total = tl.max(running)
        target = (tl.load(noise_ptr + row) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        chunk = tl.sum((running <= target).to(tl.int32))
        target -= tl.max(tl.where(index < chunk, running, 0))
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _kept(logits_ptr + row * stride, at, vocab, temperature, most, words + 3 * CHUNKS, min_p_ptr, row)
        place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32))
        tl.store(out_ptr + row, tl.where(total > 0, chunk * CHUNK + place, 0).to(tl.int64))
    else:
        peak = tl.where(inside, _real(tl.load(words + index, mask=inside, other=0)), _NEVER)
        first = tl.where(inside & (peak == most), tl.load(words + 2 * CHUNKS + index, mask=inside, other=0), 2147483647)
        tl.store(out_ptr + row, tl.min(first).to(tl.int64))
