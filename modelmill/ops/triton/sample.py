"""A token for each row without a sort: seven small kernels, several programs a row, ids as the
reference gives them.

Where top-k or top-p ask for a threshold, two passes count (or weigh, approximately) what lies above
evenly spread pivots, the second between two pivots of the first. What is left between two pivots of
the second is gathered, usually
a few hundred tokens, and there one program finds the threshold exactly. Whether the gathered tokens
suffice is checked in whole numbers; where they do not (thousands of tokens within a thousandth of
the range), the same program bisects over the whole row: slow, and right. Nothing waits for the
host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from modelmill.ops.triton.device import available as available
from modelmill.ops.triton.device import power_of_two
from modelmill.ops.triton.integer_probs import (
    NEG_INF,
    POS_INF,
    bits_to_float,
    ceil_fraction,
    float_to_bits,
    log2_ratio,
    scaled_logits,
    token_weight,
)
from modelmill.ops.triton.pdl import pdl_launch_options, pdl_wait
from modelmill.ops.triton.topk_topp import (
    ABOVE,
    GOT,
    TOTAL,
    bracket,
    filter_params,
    logit_range,
    narrow_bracket,
    pivot_step,
    sums_row_ptr,
    target_bounds,
    threshold_from_gathered,
    threshold_from_row,
    words_row_ptr,
)

PIVOTS = 32
MAX_GATHERED = 4096
_SMALL_BATCH_ROWS = 6  # up to so many, smaller chunks fill the chip


def supports(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> bool:
    """float32 rows with their columns side by side, and the parameters in the reference's
    dtypes.
    """
    real = all(t.dtype is torch.float32 for t in (logits, temperature, top_p, min_p))
    plain = all(t.is_contiguous() for t in (temperature, top_k, top_p, min_p, noise))
    known = real and top_k.dtype is torch.int32 and noise.dtype is torch.float64
    return (
        known
        and plain
        and logits.stride(1) == 1
        and logits.numel() > 0
        and logits.shape[1] < 1 << 22
    )


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
    chunk = 1024 if rows <= _SMALL_BATCH_ROWS else 4096
    count = -(-vocab // chunk)
    padded = power_of_two(count)
    sums = torch.empty((rows, 2 * PIVOTS + 4 + padded), dtype=torch.int64, device=logits.device)
    words = torch.empty(
        (rows, 2 + 3 * padded + 2 * MAX_GATHERED), dtype=torch.int32, device=logits.device
    )
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    where = (logits, logits.stride(0), vocab, temperature, sums, words)
    sizes = {"CHUNK": chunk, "CHUNKS": padded, "PIVOTS": PIVOTS, "GATHERED": MAX_GATHERED}
    # a fused multiply-add would change last bits, and so the ids
    how = {**pdl_launch_options(logits.device, rows), "enable_fp_fusion": False}
    warps = chunk // 256 if chunk < 2048 else 8
    grid = (count, rows)
    _chunk_maxima[grid](*where, **sizes, num_warps=warps, **how)
    for level in (0, 1):
        _count_above_pivots[grid](
            *where, top_k, top_p, LEVEL=level, **sizes, num_warps=warps, **how
        )
    _gather_candidates[grid](*where, top_k, top_p, **sizes, num_warps=warps, **how)
    _find_threshold[(rows,)](*where, top_k, top_p, **sizes, num_warps=8, **how)
    _sum_chunk_weights[grid](*where, min_p, **sizes, num_warps=warps, **how)
    _draw_token[(rows,)](*where, min_p, noise, out, **sizes, num_warps=warps, **how)
    return out


@triton.jit(do_not_specialize=["vocab"])
def _chunk_maxima(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk's maximum, the first place where it stands, and its least value above −inf; totals
    set to 0.
    """
    pdl_wait(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = scaled_logits(logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row))
    most = tl.max(x)
    words = words_row_ptr(words_ptr, row, CHUNKS, GATHERED)
    tl.store(words + chunk, float_to_bits(most))
    tl.store(words + CHUNKS + chunk, float_to_bits(tl.min(tl.where(x > NEG_INF, x, POS_INF))))
    tl.store(
        words + 2 * CHUNKS + chunk, tl.min(tl.where((x == most) & (at < vocab), at, 2147483647))
    )
    if chunk == 0:
        levels = sums_row_ptr(sums_ptr, row, CHUNKS, PIVOTS)
        tl.store(levels + tl.arange(0, 2 * PIVOTS), tl.zeros([2 * PIVOTS], tl.int64))
        tl.store(levels + 2 * PIVOTS + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit(do_not_specialize=["vocab"])
def _count_above_pivots(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, top_k_ptr, top_p_ptr,
    LEVEL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """F of evenly spread pivots: how many tokens are not below each, or how much they weigh
    (approximately).
    """
    pdl_wait(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, counting, wanted = filter_params(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    words = words_row_ptr(words_ptr, row, CHUNKS, GATHERED)
    most, lo = logit_range(words, vocab, CHUNK, CHUNKS)
    if wanted & (most > NEG_INF) & (most < POS_INF):
        levels = sums_row_ptr(sums_ptr, row, CHUNKS, PIVOTS)
        hi = tl.full([], POS_INF, tl.float32)
        if LEVEL == 1:
            enough, few = target_bounds(tl.load(levels), k, p, counting)
            found = narrow_bracket(
                levels, tl.load(levels + tl.arange(0, PIVOTS)), lo, hi, most, enough, few, PIVOTS
            )
            lo, hi = found[0], found[1]
        if bits_to_float(tl.load(words + chunk)) >= lo:
            step = pivot_step(lo, hi, most, PIVOTS)
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = scaled_logits(logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row))
            each = tl.where(counting, 1.0, tl.exp2(log2_ratio(x, most)))
            scale = tl.where(counting, 1.0, 1099511627776.0)
            for first in range(0, PIVOTS, 8):
                index = first + tl.arange(0, 8)
                above = x[None, :] >= (lo + step * index.to(tl.float32))[:, None]
                mass = (tl.sum(tl.where(above, each[None, :], 0.0), axis=1) * scale).to(tl.int64)
                tl.atomic_add(levels + LEVEL * PIVOTS + index, mass, mask=mass > 0, sem="relaxed")


@triton.jit(do_not_specialize=["vocab"])
def _gather_candidates(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Collect the tokens between the pivots, or all above the lower one where top-k leaves few;
    weigh the others.
    """
    pdl_wait(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, counting, wanted = filter_params(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    words = words_row_ptr(words_ptr, row, CHUNKS, GATHERED)
    most, least = logit_range(words, vocab, CHUNK, CHUNKS)
    if wanted & (most > NEG_INF) & (most < POS_INF):
        levels = sums_row_ptr(sums_ptr, row, CHUNKS, PIVOTS)
        lo, hi, at_lo, _at_hi = bracket(levels, most, least, k, p, counting, PIVOTS)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = scaled_logits(logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row))
        if counting == 0:
            weight = token_weight(x, most)
            tl.atomic_add(levels + 2 * PIVOTS + TOTAL, tl.sum(weight), sem="relaxed")
            tl.atomic_add(
                levels + 2 * PIVOTS + ABOVE, tl.sum(tl.where(x >= hi, weight, 0)), sem="relaxed"
            )
        # not "|": to Triton 3.9's interpreter a mask with a scalar's comparison in it is no boolean
        take = (x >= lo) & tl.where(counting & (at_lo <= GATHERED), True, x < hi)
        counter = levels + 2 * PIVOTS + GOT + tl.zeros([CHUNK], tl.int32)
        place = tl.atomic_add(counter, take.to(tl.int64), mask=take, sem="relaxed")
        take = take & (place < GATHERED)
        tl.store(words + 3 * CHUNKS + 2 + place, float_to_bits(x), mask=take)
        tl.store(words + 3 * CHUNKS + 2 + GATHERED + place, at, mask=take)


@triton.jit(do_not_specialize=["vocab"])
def _find_threshold(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The threshold that top-k and top-p leave, and the last id among tokens of just that value."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, p, counting, wanted = filter_params(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab)
    words = words_row_ptr(words_ptr, row, CHUNKS, GATHERED)
    levels = sums_row_ptr(sums_ptr, row, CHUNKS, PIVOTS)
    most, least = logit_range(words, vocab, CHUNK, CHUNKS)
    temperature = tl.load(temperature_ptr + row)
    row_ptr = logits_ptr + row * stride
    threshold, cut = tl.full([], NEG_INF, tl.float32), vocab
    if most == POS_INF:
        threshold = -most
    if wanted & (most > NEG_INF):
        right, known = most < NEG_INF, most < NEG_INF
        got = tl.load(levels + 2 * PIVOTS + GOT)
        # where k reaches down to tokens without weight, the pivots do not reach its threshold
        if (most < POS_INF) & ((counting == 0) | (tl.load(levels) >= k)):
            if got <= GATHERED // 4:
                threshold, cut, right = threshold_from_gathered(
                    levels,
                    words,
                    vocab,
                    most,
                    least,
                    k,
                    p,
                    counting,
                    CHUNKS,
                    PIVOTS,
                    GATHERED,
                    GATHERED // 4,
                )
                known = counting
            elif got <= GATHERED:
                threshold, cut, right = threshold_from_gathered(
                    levels,
                    words,
                    vocab,
                    most,
                    least,
                    k,
                    p,
                    counting,
                    CHUNKS,
                    PIVOTS,
                    GATHERED,
                    GATHERED,
                )
                known = counting
        if right == 0:
            searching = counting & (known == 0)
            threshold, cut = threshold_from_row(
                row_ptr, vocab, temperature, most, k, p, searching, threshold, 512
            )
    tl.store(words + 3 * CHUNKS, float_to_bits(threshold))
    tl.store(words + 3 * CHUNKS + 1, cut)


@triton.jit
def _filtered_weights(row_ptr, at, vocab, temperature, row_max, state, min_p_ptr, row):
    """Weights of the tokens that every filter keeps."""
    x = scaled_logits(row_ptr, at, vocab, temperature)
    threshold, cut = bits_to_float(tl.load(state)), tl.load(state + 1)
    weight = token_weight(x, row_max)
    least = ceil_fraction(tl.load(min_p_ptr + row), tl.full([], 1099511627776, tl.int64))
    keep = (x > threshold) | ((x == threshold) & (at <= cut))
    return tl.where(keep & (weight >= least), weight, 0)


@triton.jit(do_not_specialize=["vocab"])
def _sum_chunk_weights(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, min_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What is kept of each chunk."""
    pdl_wait(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        words = words_row_ptr(words_ptr, row, CHUNKS, GATHERED)
        most = logit_range(words, vocab, CHUNK, CHUNKS)[0]
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _filtered_weights(
            logits_ptr + row * stride,
            at,
            vocab,
            temperature,
            most,
            words + 3 * CHUNKS,
            min_p_ptr,
            row,
        )
        levels = sums_row_ptr(sums_ptr, row, CHUNKS, PIVOTS)
        tl.store(levels + 2 * PIVOTS + 4 + chunk, tl.sum(weight))


@triton.jit(do_not_specialize=["vocab"])
def _draw_token(
    logits_ptr, stride, vocab, temperature_ptr, sums_ptr, words_ptr, min_p_ptr, noise_ptr, out_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The id: the place of the maximum, or where the running sum of what is kept passes the noise's
    share of it.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    words = words_row_ptr(words_ptr, row, CHUNKS, GATHERED)
    most = logit_range(words, vocab, CHUNK, CHUNKS)[0]
    index = tl.arange(0, CHUNKS)
    inside = index * CHUNK < vocab
    if temperature > 0:
        levels = sums_row_ptr(sums_ptr, row, CHUNKS, PIVOTS)
        running = tl.cumsum(tl.load(levels + 2 * PIVOTS + 4 + index, mask=inside, other=0), 0)
        total = tl.max(running)
        target = (tl.load(noise_ptr + row) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        chunk = tl.sum((running <= target).to(tl.int32))
        target -= tl.max(tl.where(index < chunk, running, 0))
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        weight = _filtered_weights(
            logits_ptr + row * stride,
            at,
            vocab,
            temperature,
            most,
            words + 3 * CHUNKS,
            min_p_ptr,
            row,
        )
        place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32))
        tl.store(out_ptr + row, tl.where(total > 0, chunk * CHUNK + place, 0).to(tl.int64))
    else:
        peak = tl.where(
            inside, bits_to_float(tl.load(words + index, mask=inside, other=0)), NEG_INF
        )
        first = tl.where(
            inside & (peak == most),
            tl.load(words + 2 * CHUNKS + index, mask=inside, other=0),
            2147483647,
        )
        tl.store(out_ptr + row, tl.min(first).to(tl.int64))
