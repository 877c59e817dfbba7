"""Sampling without a sort: seven small kernels, several programs per row, ids as the reference.

Computes: ids[M] of logits[M, vocab]: temperature, top-k, top-p, min-p
Dtypes: logits float32; noise float64; integer probabilities
Layout: row-major, contiguous columns
Range: any M; vocab < 2^22
Technique: seven kernels, several programs per row, thresholds by counting instead of a sort, no
    synchronization with the host, PDL
Ops: sample

Where top-k or top-p need a threshold, two passes count (or approximately weigh) the tokens above
evenly spaced pivots; the second pass refines between two pivots of the first. The tokens between
two pivots of the second pass, usually a few hundred, are gathered, and one program finds the exact
threshold among them. Integer sums show whether the gathered tokens suffice. If not (thousands of
tokens within a thousandth of the range), the same program bisects over the whole row, which is slow
but exact. Nothing synchronizes with the host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from modelmill.ops.sample import SAMPLE_SUPPORT_RANGE, SampleInputs
from modelmill.ops.triton.common.device import next_power_of_two
from modelmill.ops.triton.common.device import unavailable_reason as unavailable_reason
from modelmill.ops.triton.common.pdl import pdl_launch_options, pdl_wait_and_trigger
from modelmill.ops.triton.sampling.integer_probs import (
    NEG_INF,
    POS_INF,
    bits_to_float,
    ceil_fraction,
    float_to_bits,
    load_temperature_scaled_logits,
    log2_ratio,
    token_weight,
)
from modelmill.ops.triton.sampling.topk_topp import (
    NUM_GATHERED_SLOT,
    TOTAL_WEIGHT_SLOT,
    WEIGHT_ABOVE_BRACKET_SLOT,
    find_threshold_bracket,
    load_row_max_and_floor,
    load_topk_topp_params,
    narrow_bracket,
    pivot_step,
    scratch32_row_ptr,
    scratch64_row_ptr,
    target_bounds,
    threshold_from_gathered,
    threshold_from_row,
)

PIVOTS = 32
MAX_GATHERED = 4096
_SMALL_BATCH_ROWS = 6  # up to this many rows, smaller chunks are needed to use all SMs


SUPPORTED_PROBLEMS = (replace(SAMPLE_SUPPORT_RANGE, max_width=(1 << 22) - 1),)


def supports(inputs: SampleInputs) -> bool:
    """Whether parameters, and the columns of the logits, are contiguous."""
    return inputs.logits.stride(1) == 1 and all(each.is_contiguous() for each in inputs[1:])


def run(inputs: SampleInputs) -> torch.Tensor:
    """Run the op, bit-identical to the reference."""
    logits, temperature, top_k, top_p, min_p, noise = inputs
    rows, vocab = logits.shape
    chunk = 1024 if rows <= _SMALL_BATCH_ROWS else 4096
    count = -(-vocab // chunk)
    padded = next_power_of_two(count)
    scratch64 = torch.empty(
        (rows, 2 * PIVOTS + 4 + padded), dtype=torch.int64, device=logits.device
    )
    scratch32 = torch.empty(
        (rows, 2 + 3 * padded + 2 * MAX_GATHERED), dtype=torch.int32, device=logits.device
    )
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    row_args = (logits, logits.stride(0), vocab, temperature, scratch64, scratch32)
    sizes = {"CHUNK": chunk, "CHUNKS": padded, "PIVOTS": PIVOTS, "GATHERED": MAX_GATHERED}
    # a fused multiply-add would change the last bits and so the ids
    options = {**pdl_launch_options(logits.device, rows), "enable_fp_fusion": False}
    warps = chunk // 256 if chunk < 2048 else 8
    grid = (count, rows)
    _chunk_extrema_and_reset_totals[grid](*row_args, **sizes, num_warps=warps, **options)
    for level in (0, 1):
        _sum_mass_above_pivots[grid](
            *row_args, top_k, top_p, LEVEL=level, **sizes, num_warps=warps, **options
        )
    _gather_candidates[grid](*row_args, top_k, top_p, **sizes, num_warps=warps, **options)
    _find_threshold[(rows,)](*row_args, top_k, top_p, **sizes, num_warps=8, **options)
    _sum_chunk_weights[grid](*row_args, min_p, **sizes, num_warps=warps, **options)
    _draw_token[(rows,)](*row_args, min_p, noise, out, **sizes, num_warps=warps, **options)
    return out


@triton.jit(do_not_specialize=["vocab"])
def _chunk_extrema_and_reset_totals(
    logits_ptr, stride, vocab, temperature_ptr, scratch64_ptr, scratch32_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Store each chunk's maximum, its first index, and the minimum above −inf; clear the totals."""
    pdl_wait_and_trigger(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_temperature_scaled_logits(
        logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row)
    )
    chunk_max = tl.max(x)
    scratch32 = scratch32_row_ptr(scratch32_ptr, row, CHUNKS, GATHERED)
    tl.store(scratch32 + chunk, float_to_bits(chunk_max))
    tl.store(scratch32 + CHUNKS + chunk, float_to_bits(tl.min(tl.where(x > NEG_INF, x, POS_INF))))
    tl.store(
        scratch32 + 2 * CHUNKS + chunk,
        tl.min(tl.where((x == chunk_max) & (at < vocab), at, 2147483647)),
    )
    if chunk == 0:
        scratch64 = scratch64_row_ptr(scratch64_ptr, row, CHUNKS, PIVOTS)
        tl.store(scratch64 + tl.arange(0, 2 * PIVOTS), tl.zeros([2 * PIVOTS], tl.int64))
        tl.store(scratch64 + 2 * PIVOTS + tl.arange(0, 4), tl.zeros([4], tl.int64))


@triton.jit(do_not_specialize=["vocab"])
def _sum_mass_above_pivots(
    logits_ptr, stride, vocab, temperature_ptr, scratch64_ptr, scratch32_ptr, top_k_ptr, top_p_ptr,
    LEVEL: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """F of evenly spaced pivots: number, or approximate weight, of tokens ≥ each pivot."""
    pdl_wait_and_trigger(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, counting, filters = load_topk_topp_params(
        temperature_ptr, top_k_ptr, top_p_ptr, row, vocab
    )
    scratch32, row_max, lo = load_row_max_and_floor(
        scratch32_ptr, row, vocab, CHUNK, CHUNKS, GATHERED
    )
    if filters & (row_max > NEG_INF) & (row_max < POS_INF):
        scratch64 = scratch64_row_ptr(scratch64_ptr, row, CHUNKS, PIVOTS)
        hi = tl.full([], POS_INF, tl.float32)
        if LEVEL == 1:
            sufficient, insufficient = target_bounds(tl.load(scratch64), k, p, counting)
            mass = tl.load(scratch64 + tl.arange(0, PIVOTS))
            narrowed = narrow_bracket(
                scratch64, mass, lo, hi, row_max, sufficient, insufficient, PIVOTS
            )
            lo, hi = narrowed[0], narrowed[1]
        if bits_to_float(tl.load(scratch32 + chunk)) >= lo:
            step = pivot_step(lo, hi, row_max, PIVOTS)
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_temperature_scaled_logits(
                logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row)
            )
            token_mass = tl.where(counting, 1.0, tl.exp2(log2_ratio(x, row_max)))
            scale = tl.where(counting, 1.0, 1099511627776.0)
            for first in range(0, PIVOTS, 8):
                index = first + tl.arange(0, 8)
                above = x[None, :] >= (lo + step * index.to(tl.float32))[:, None]
                masses = tl.sum(tl.where(above, token_mass[None, :], 0.0), axis=1) * scale
                counts = masses.to(tl.int64)
                at_level = scratch64 + LEVEL * PIVOTS + index
                tl.atomic_add(at_level, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["vocab"])
def _gather_candidates(
    logits_ptr, stride, vocab, temperature_ptr, scratch64_ptr, scratch32_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr, GATHERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gather the tokens between the pivots, and sum the exact weights.

    If top-k keeps few tokens, all above the lower pivot are gathered.
    """
    pdl_wait_and_trigger(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k, p, counting, filters = load_topk_topp_params(
        temperature_ptr, top_k_ptr, top_p_ptr, row, vocab
    )
    scratch32, row_max, row_min = load_row_max_and_floor(
        scratch32_ptr, row, vocab, CHUNK, CHUNKS, GATHERED
    )
    scratch64 = scratch64_row_ptr(scratch64_ptr, row, CHUNKS, PIVOTS)
    if filters & (row_max > NEG_INF) & (row_max < POS_INF):
        lo, hi, at_lo, _at_hi = find_threshold_bracket(
            scratch64, row_max, row_min, k, p, counting, PIVOTS
        )
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_temperature_scaled_logits(
            logits_ptr + row * stride, at, vocab, tl.load(temperature_ptr + row)
        )
        if counting == 0:
            weight = token_weight(x, row_max)
            tl.atomic_add(scratch64 + 2 * PIVOTS + TOTAL_WEIGHT_SLOT, tl.sum(weight), sem="relaxed")
            tl.atomic_add(
                scratch64 + 2 * PIVOTS + WEIGHT_ABOVE_BRACKET_SLOT,
                tl.sum(tl.where(x >= hi, weight, 0)),
                sem="relaxed",
            )
        # not "|": Triton 3.9's interpreter does not accept a scalar comparison in a mask
        take = (x >= lo) & tl.where(counting & (at_lo <= GATHERED), True, x < hi)
        counter = scratch64 + 2 * PIVOTS + NUM_GATHERED_SLOT + tl.zeros([CHUNK], tl.int32)
        slot = tl.atomic_add(counter, take.to(tl.int64), mask=take, sem="relaxed")
        take = take & (slot < GATHERED)
        tl.store(scratch32 + 3 * CHUNKS + 2 + slot, float_to_bits(x), mask=take)
        tl.store(scratch32 + 3 * CHUNKS + 2 + GATHERED + slot, at, mask=take)


@triton.jit(do_not_specialize=["vocab"])
def _find_threshold(
    logits_ptr, stride, vocab, temperature_ptr, scratch64_ptr, scratch32_ptr, top_k_ptr, top_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The threshold of top-k and top-p, and the last id among tokens equal to it."""
    pdl_wait_and_trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    k, p, counting, filters = load_topk_topp_params(
        temperature_ptr, top_k_ptr, top_p_ptr, row, vocab
    )
    scratch32, row_max, row_min = load_row_max_and_floor(
        scratch32_ptr, row, vocab, CHUNK, CHUNKS, GATHERED
    )
    scratch64 = scratch64_row_ptr(scratch64_ptr, row, CHUNKS, PIVOTS)
    temperature = tl.load(temperature_ptr + row)
    row_ptr = logits_ptr + row * stride
    threshold, last_id = tl.full([], NEG_INF, tl.float32), vocab
    if row_max == POS_INF:
        threshold = -row_max
    if filters & (row_max > NEG_INF):
        exact, top_k_done = row_max < NEG_INF, row_max < NEG_INF
        num_gathered = tl.load(scratch64 + 2 * PIVOTS + NUM_GATHERED_SLOT)
        # if the top k include tokens of weight 0, the threshold is below all pivots
        if (row_max < POS_INF) & ((counting == 0) | (tl.load(scratch64) >= k)):
            if num_gathered <= GATHERED // 4:
                threshold, last_id, exact = threshold_from_gathered(
                    scratch64, scratch32, vocab, row_max, row_min, k, p, counting,
                    CHUNKS, PIVOTS, GATHERED, GATHERED // 4,
                )  # fmt: skip
                top_k_done = counting
            elif num_gathered <= GATHERED:
                threshold, last_id, exact = threshold_from_gathered(
                    scratch64, scratch32, vocab, row_max, row_min, k, p, counting,
                    CHUNKS, PIVOTS, GATHERED, GATHERED,
                )  # fmt: skip
                top_k_done = counting
        if exact == 0:
            searching = counting & (top_k_done == 0)
            threshold, last_id = threshold_from_row(
                row_ptr, vocab, temperature, row_max, k, p, searching, threshold, 512
            )
    tl.store(scratch32 + 3 * CHUNKS, float_to_bits(threshold))
    tl.store(scratch32 + 3 * CHUNKS + 1, last_id)


@triton.jit
def _filtered_weights(
    logits_ptr, stride, vocab, temperature, row_max, state, min_p_ptr, row, chunk,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Weights of the tokens of a chunk that all filters keep."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_temperature_scaled_logits(logits_ptr + row * stride, at, vocab, temperature)
    threshold, last_id = bits_to_float(tl.load(state)), tl.load(state + 1)
    weight = token_weight(x, row_max)
    min_weight = ceil_fraction(tl.load(min_p_ptr + row), tl.full([], 1099511627776, tl.int64))
    keep = (x > threshold) | ((x == threshold) & (at <= last_id))
    return tl.where(keep & (weight >= min_weight), weight, 0)


@triton.jit(do_not_specialize=["vocab"])
def _sum_chunk_weights(
    logits_ptr, stride, vocab, temperature_ptr, scratch64_ptr, scratch32_ptr, min_p_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum of the kept weights of each chunk."""
    pdl_wait_and_trigger(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        scratch32, row_max, _ = load_row_max_and_floor(
            scratch32_ptr, row, vocab, CHUNK, CHUNKS, GATHERED
        )
        weight = _filtered_weights(
            logits_ptr, stride, vocab, temperature, row_max, scratch32 + 3 * CHUNKS, min_p_ptr, row,
            chunk, CHUNK,
        )  # fmt: skip
        scratch64 = scratch64_row_ptr(scratch64_ptr, row, CHUNKS, PIVOTS)
        tl.store(scratch64 + 2 * PIVOTS + 4 + chunk, tl.sum(weight))


@triton.jit(do_not_specialize=["vocab"])
def _draw_token(
    logits_ptr, stride, vocab, temperature_ptr, scratch64_ptr, scratch32_ptr, min_p_ptr,
    noise_ptr, out_ptr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, GATHERED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The id: index of the maximum, or where the cumulative kept weight passes noise · total."""
    pdl_wait_and_trigger(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    scratch32, row_max, _ = load_row_max_and_floor(
        scratch32_ptr, row, vocab, CHUNK, CHUNKS, GATHERED
    )
    index = tl.arange(0, CHUNKS)
    inside = index * CHUNK < vocab
    if temperature > 0:
        scratch64 = scratch64_row_ptr(scratch64_ptr, row, CHUNKS, PIVOTS)
        cumulative = tl.cumsum(tl.load(scratch64 + 2 * PIVOTS + 4 + index, mask=inside, other=0), 0)
        total = tl.max(cumulative)
        target = (tl.load(noise_ptr + row) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        chunk = tl.sum((cumulative <= target).to(tl.int32))
        target -= tl.max(tl.where(index < chunk, cumulative, 0))
        weight = _filtered_weights(
            logits_ptr, stride, vocab, temperature, row_max, scratch32 + 3 * CHUNKS, min_p_ptr, row,
            chunk, CHUNK,
        )  # fmt: skip
        offset = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32))
        tl.store(out_ptr + row, tl.where(total > 0, chunk * CHUNK + offset, 0).to(tl.int64))
    else:
        chunk_max = tl.where(
            inside, bits_to_float(tl.load(scratch32 + index, mask=inside, other=0)), NEG_INF
        )
        first = tl.where(
            inside & (chunk_max == row_max),
            tl.load(scratch32 + 2 * CHUNKS + index, mask=inside, other=0),
            2147483647,
        )
        tl.store(out_ptr + row, tl.min(first).to(tl.int64))
